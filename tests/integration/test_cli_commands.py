"""The command line against a real `kvwire server` process."""

from __future__ import annotations

import json
import urllib.request
from array import array

import pytest

from kvwire.cli import app
from kvwire.cli.bench.processes import kvwire_server, work_folder
from kvwire.cli.bench.prompts import Prompts
from kvwire.client import Client

LENGTH = 2048


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(address, HTTP address)"""
    with (
        work_folder() as folder,
        kvwire_server(folder, ["--l1-size", "16MiB", "--http", "127.0.0.1:0"]) as at,
    ):
        log = (folder / "kvwire server.log").read_text()
        http = log.split("http://")[1].split("/")[0]
        yield at, http


@pytest.fixture(scope="module")
def prompts(server):
    with Client(server[0]) as client:
        yield Prompts(client)


@pytest.fixture(scope="module")
def stored(prompts):
    tokens = array("I")
    tokens.frombytes(prompts.stored(LENGTH).tokens)
    return list(tokens)


def run(server, *argv):
    return app.main([*argv, "--address", server[0]])


def as_json(server, capsys, *argv):
    assert run(server, *argv, "-o", "json") == 0
    return json.loads(capsys.readouterr().out)


def test_ping(server, stored, capsys):
    found = as_json(server, capsys, "ping", "-n", "3")
    assert found["pings"] == 3
    assert found["chunk_size"] == 256
    assert found["draining"] is False
    assert len(found["incarnation"]) == 32
    assert 0 < found["p50_us"] <= found["max_us"]
    assert run(server, "ping") == 0
    assert "256 tokens" in capsys.readouterr().out


def test_status(server, stored, capsys):
    found = as_json(server, capsys, "status")
    assert found["addresses"] == [server[0]]
    assert found["chunk_size"]["chunk_size"] == 256
    assert found["memory"]["capacity_bytes"] >= 16 << 20
    assert found["memory"]["chunks"] == LENGTH // 256
    assert found["registrations"][0]["client_name"] == "kvwire bench"
    assert found["registrations"][0]["path"] == "inline"
    assert all(task["running"] for task in found["tasks"])
    assert run(server, "status") == 0
    shown = capsys.readouterr().out
    assert "kvwire bench" in shown
    assert "moved by inline" in shown


@pytest.mark.parametrize(("length", "hit"), [(LENGTH, LENGTH), (LENGTH - 1, LENGTH - 256), (100, 0)])
def test_lookup_of_a_registered_namespace(server, stored, capsys, tmp_path, length, hit):
    file = tmp_path / "prompt.txt"
    file.write_text(" ".join(map(str, stored[:length])))
    found = as_json(server, capsys, "lookup", "--tokens-file", str(file))
    assert found["prompt_tokens"] == length
    assert found["hit_tokens"] == hit
    assert found["asked_chunks"] == length // 256
    assert run(server, "lookup", "--tokens-file", str(file)) == 0
    assert f"{hit} tokens (" in capsys.readouterr().out


def test_lookup_only_looks(server, stored, capsys, tmp_path):
    before = as_json(server, capsys, "status")
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(stored))
    as_json(server, capsys, "lookup", "--tokens-file", str(file))
    after = as_json(server, capsys, "status")
    assert after["sessions"] == before["sessions"]
    assert after["leases"] == before["leases"]
    assert after["counters"]["asked_tokens"] == before["counters"]["asked_tokens"]


def test_bl55_another_tenant_finds_nothing_and_the_salt_is_nowhere(server, stored, capsys, tmp_path):
    prompt, salt = tmp_path / "prompt.json", tmp_path / "salt"
    prompt.write_text(json.dumps(stored))
    salt.write_text("tenant-s3cret\n")
    argv = ("lookup", "--tokens-file", str(prompt), "--salt-file", str(salt))
    assert as_json(server, capsys, *argv)["hit_tokens"] == 0
    assert run(server, *argv) == 0
    assert "s3cret" not in "".join(capsys.readouterr())
    assert run(server, "status", "-o", "json") == 0
    assert "s3cret" not in capsys.readouterr().out
    metrics = urllib.request.urlopen(f"http://{server[1]}/metrics", timeout=5).read().decode()
    assert "s3cret" not in metrics


def test_lookup_of_another_model_is_a_miss(server, stored, capsys):
    argv = ("lookup", "--tokens", ",".join(map(str, stored)), "--model", "another")
    assert as_json(server, capsys, *argv)["hit_tokens"] == 0


def test_metrics_of_a_running_server(server, prompts, stored):
    with urllib.request.urlopen(f"http://{server[1]}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(samples['kvwire_rpc_calls_total{code="OK",method="CommitStore"}']) >= 1
    assert float(samples['kvwire_stored_bytes_total{path="inline"}']) == LENGTH // 256 * 64
    asked = float(samples["kvwire_lookup_asked_tokens_total"])
    hit = float(samples['kvwire_lookup_hit_tokens_total{tier="memory"}'])
    assert asked == hit + float(samples["kvwire_lookup_missed_tokens_total"]) > 0
    with urllib.request.urlopen(f"http://{server[1]}/healthz", timeout=5) as answer:
        assert answer.read() == b"ok\n"


def test_clear_says_what_to_name(server, capsys):
    assert run(server, "clear") == app.USAGE
    assert run(server, "clear", "--model", "m", "--all") == app.USAGE
    assert "--all" in capsys.readouterr().err


def test_clear_drops_one_model_or_all(server, prompts, capsys):
    prompts.stored(LENGTH)
    (model,) = {each["namespace"]["model"] for each in as_json(server, capsys, "status")["namespaces"]}
    chunks = as_json(server, capsys, "status")["memory"]["chunks"]
    assert as_json(server, capsys, "clear", "--yes", "--model", "another", "--layout-fingerprint", "00") == {
        "cleared_chunks": 0,
        "kept_chunks": 0,
    }
    assert as_json(server, capsys, "clear", "--yes", "--model", model)["cleared_chunks"] == chunks > 0
    assert as_json(server, capsys, "status")["memory"]["chunks"] == 0
    prompts.stored(LENGTH)
    assert as_json(server, capsys, "clear", "--yes", "--all")["cleared_chunks"] == LENGTH // 256


def test_clear_keeps_what_is_in_use_and_says_so(server, prompts, capsys):
    tokens = prompts.stored(LENGTH).tokens
    prompts.client.lookup(
        prompts.namespace, tokens, registration_id=prompts.registration_id, session_id="reads"
    )
    assert run(server, "clear", "--yes", "--all", "-o", "json") == app.FAILED
    told = capsys.readouterr()
    assert json.loads(told.out) == {"cleared_chunks": 0, "kept_chunks": LENGTH // 256}
    assert "in use" in told.err
    prompts.client.end_sessions(prompts.registration_id, ["reads"])
    assert as_json(server, capsys, "clear", "--yes", "--all")["cleared_chunks"] == LENGTH // 256
