"""`kvwire bench peer` in small: what it reports and that bytes were compared, never how fast."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvwire.cli import app
from kvwire.cli.bench.blocks import BLOCK_BYTES
from kvwire.cli.bench.peer import plan

pytestmark = pytest.mark.leakcheck("shm")

TINY = replace(
    plan.QUICK, sizes=(32 << 20,), rounds=1, warmup=0, idle_s=0.2, stale_prompts=4, stale_lookups=10
)


@pytest.fixture
def bench(capsys, monkeypatch):
    monkeypatch.setattr(plan, "QUICK", TINY)

    def run(*argv):
        assert app.main(["bench", "peer", "--quick", "--json", *argv]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize(
    ("path", "goal"), [("ucx-remote", "peer_vs_raw_socket"), ("ucx-local", "peer_vs_memcpy")]
)
def test_what_moves_between_servers_is_compared(bench, path, goal, tmp_path):
    chart = tmp_path / "peers.png"
    found = bench("--part", "transfer", "--path", path, "--plot", str(chart))
    reports = found["transfer"]["paths"][path]
    if "skipped" in reports:
        pytest.skip(reports["skipped"])
    (each,) = reports.values()
    assert each["verified"] is True
    assert each["path"] == path
    assert each["arena"] == ("private" if path == "ucx-local" else "shm")
    assert each["fetched_bytes"] == 2 * 16 * BLOCK_BYTES
    assert each["failed_hints"] == each["failed_transfers"] == 0
    assert all(each[name] > 0 for name in ("fetch_vs_memcpy", "fetch_gb_s", "fetch_at_once_gb_s"))
    assert found[goal] > 0
    assert found["transfer"]["heartbeats"]["idle"]["count"] > 0
    assert found["ttft_peer_vs_recompute"] is None
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_stale_hints_cost_lookups_and_never_wrong_bytes(bench):
    found = bench("--part", "stale")["stale_lookups"]
    chunks = found["prompt_chunks"]
    shares = found["shares"]
    assert [each["stale_share"] for each in shares] == [0, 0.1, 0.5]
    assert [each["fetched_bytes"] for each in shares] == [n * found["prompt_bytes"] for n in (10, 9, 5)]
    assert [each["fetched_chunks"] for each in shares] == [n * chunks for n in (10, 9, 5)]
    assert [each["fallback_chunks"] for each in shares] == [n * chunks for n in (0, 1, 5)]
    assert shares[0]["failed_hints"] == 0
    assert 0 < shares[1]["failed_hints"] < shares[2]["failed_hints"]


def test_nothing_of_a_killed_server_is_found(bench):
    found = bench("--part", "restart")["restart"]
    assert found["hits_meanwhile"] == 0
    assert found["lookups_meanwhile"] > 0
    assert 0 < found["registered_ms"] <= found["clean_ms"]
    assert found["expired_ms"] > 0
