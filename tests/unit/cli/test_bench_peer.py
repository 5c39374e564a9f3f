"""`kvwire bench peer`: what it keeps from a coordinator, how it counts, what it draws and refuses."""

from __future__ import annotations

import importlib.util
import json

import pytest

from kvwire.cli import app
from kvwire.cli.bench.peer import lifesigns, relay, show, stale
from kvwire.cli.bench.peer.fleet import HEARTBEAT_S, Counts
from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import event_pb2

KINDS = event_pb2.CacheEventKind


def report(server_id):
    batch = event_pb2.CacheEventBatch(server_id=server_id, incarnation=b"i" * 16, sequence=3)
    for kind in KINDS.values()[1:]:
        batch.events.add(kind=kind, tier=1)
    return pb.ReportEventsRequest(batch=batch).SerializeToString()


def test_only_evictions_of_one_server_are_withheld():
    batch = pb.ReportEventsRequest.FromString(relay.without_evictions(report("a"), "a")).batch
    assert (batch.server_id, batch.sequence) == ("a", 3)
    assert [KINDS.Name(each.kind) for each in batch.events] == [
        "CACHE_EVENT_KIND_STORE",
        "CACHE_EVENT_KIND_ACCESS",
    ]
    assert relay.without_evictions(report("b"), "a") == report("b")


def test_a_life_sign_is_late_by_what_exceeds_the_interval():
    times = [0.0, HEARTBEAT_S, 2 * HEARTBEAT_S + 0.5, 3 * HEARTBEAT_S + 0.4]
    assert lifesigns.lateness(times) == pytest.approx([0, 0.5, 0])
    assert lifesigns.lateness(times, [(HEARTBEAT_S + 0.1, HEARTBEAT_S + 0.2)]) == pytest.approx([0.5])
    assert lifesigns.lateness(times, []) == []


class CountingServer:
    """Its counters grow with every fetch."""

    server_id = "b"

    def __init__(self):
        self.told = admin.SharingStatus(peers=[admin.PeerStatus(server_id="a")])

    def sharing(self):
        return self.told


class FakeFleet:
    def __init__(self):
        self.b = CountingServer()
        self.emptied_times = 0

    def emptied(self, _server):
        self.emptied_times += 1


def test_a_share_of_the_prompts_goes_stale_and_stays_so():
    fleet, evicted, asked = FakeFleet(), [], []

    def ask(prompt, gone):
        asked.append((prompt, gone))
        fleet.b.told.fallback_chunks += gone
        fleet.b.told.peers[0].fetched_bytes += 10 * (not gone)
        return 0.002 if gone else 0.001

    found = stale.by_share(
        (0.5, 0.0, 0.1),
        list(range(10)),
        evict=evicted.append,
        ask=ask,
        running=fleet,
        progress=lambda _what: None,
    )
    assert evicted == list(range(5))
    assert fleet.emptied_times == 3
    assert sorted(asked[-10:]) == [(number, number < 5) for number in range(10)]
    assert [each["stale_share"] for each in found] == [0, 0.1, 0.5]
    assert [each["fallback_chunks"] for each in found] == [0, 1, 5]
    assert [each["fetched_bytes"] for each in found] == [100, 90, 50]
    assert [each["mean_ms"] for each in found] == [1, 1.1, 1.5]
    assert [each["stale_mean_ms"] for each in found] == [None, 2, 2]
    assert found[2]["p99_ms"] == 2


def test_counts_are_of_all_peers():
    peers = [admin.PeerStatus(fetched_bytes=5, failed_hints=1), admin.PeerStatus(fetched_bytes=7)]
    server = CountingServer()
    before = Counts.of(server)
    server.told = admin.SharingStatus(peers=peers, fetched_chunks=3)
    since = Counts.of(server).since(before)
    assert (since["fetched_bytes"], since["failed_hints"], since["fetched_chunks"]) == (12, 1, 3)


def test_a_path_that_is_not_here_is_shown_with_its_reason(capfd):
    signs = {"count": 0, "p50_ms": 0.0, "p99_ms": 0.0, "max_ms": 0.0}
    show.table(
        {
            **dict.fromkeys(show.GOALS),
            "skipped": {"engines": "pip install 'kvwire[vllm]'"},
            "transfer": {
                "paths": {"ucx-local": {"skipped": "pip install 'kvwire[ucx-cu12]'"}},
                "heartbeats": {"interval_ms": 50, "idle": signs, "during_transfers": signs},
            },
        }
    )
    shown = capfd.readouterr().out
    assert "kvwire[ucx-cu12]" in shown
    assert "kvwire[vllm]" in shown


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--part", "tail"), "--part tail: it is one of transfer, engines, stale, restart"),
        (("--path", "shm"), "--path shm: it is one of ucx-remote, ucx-local"),
        (("--size", "33MiB"), "--size 33MiB is no multiple of a chunk, 32MiB"),
        (("--prompt-tokens", "64"), "--prompt-tokens 64: nothing of it is shared with chunks of 64 tokens"),
    ],
)
def test_wrong_usage(argv, told, capsys):
    assert app.main(["bench", "peer", *argv]) == app.USAGE
    assert told in capsys.readouterr().err


def test_without_ucx_every_part_says_what_is_missing(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "ucxx" else find(name)
    )
    argv = (
        "--part",
        "transfer",
        "--part",
        "stale",
        "--part",
        "restart",
        "--size",
        "32MiB",
        "--quick",
        "--json",
    )
    assert app.main(["bench", "peer", *argv]) == 0
    found = json.loads(capsys.readouterr().out)
    told = [found["skipped"][part] for part in ("stale", "restart")]
    told += [each["skipped"] for each in found["transfer"]["paths"].values()]
    assert len(told) == 4
    assert all("ucx" in each for each in told)
