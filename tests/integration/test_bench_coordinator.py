"""`kvwire bench coordinator` in small: what it reports, never how fast."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvwire.cli import app
from kvwire.cli.bench.coordinator import plan

TINY = replace(
    plan.QUICK,
    ingest_batches=2,
    token_batches=1,
    ingest_rounds=1,
    idle_s=0.05,
    settle_s=0.05,
    sizes=(6_000, 8_000),
    lookups=2,
    lookup_rounds=1,
    fenced=8_000,
    fence_watch_s=0.1,
    healed_keys=2_000,
    delays=(0.0, 0.1),
    churns=(1.0,),
    stale_s=0.6,
    visible_rounds=1,
)
FAULTS = {
    *("gap", "server restart", "expiry", "return of an expired server"),
    *("coordinator killed", "coordinator killed, with checkpoint"),
}


@pytest.mark.leakcheck("shm")
def test_the_coordinator_is_measured_in_full(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(plan, "QUICK", TINY)
    picture = tmp_path / "plot.png"
    assert app.main(["bench", "coordinator", "--quick", "--json", "--plot", str(picture)]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    positive = {
        *("ingest_per_s", "ingest_with_tokens_per_s", "ingest_vs_parse", "locate_131072_vs_echo"),
        *("fence_max_heartbeat_ms", "fence_max_lookup_ms", "visible_ms"),
    }
    assert all(found[name] > 0 for name in positive)
    # Of so few keys the memory is that of the program.
    assert "bytes_per_key" in found
    assert found["compared_at_keys"] == found["fenced_placements"] == 8_000
    assert [each["keys"] for each in found["directory"]["sizes"]] == [6_000, 8_000]
    assert {each["limited_by"] for each in found["ingest"].values()} <= {"coordinator", "sender"}
    assert set(found["recovery"]["whole_ms"]) == FAULTS
    assert found["recovery"]["whole_ms"]["expiry"]["median"] >= 1000
    cells = found["staleness"]["cells"]
    assert [each["event_delay_ms"] for each in cells] == [0, 100]
    assert all(0 <= each["failed_hints"] < 0.5 and each["hints"] > 0 for each in cells)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "time to whole: gap" in printed.err
