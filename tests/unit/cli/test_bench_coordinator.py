"""The simulated servers of `kvwire bench coordinator`: what they send, and what they hold."""

from __future__ import annotations

import pytest

from kvwire.cli.bench.coordinator import probe, staleness, wire
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import event_pb2
from kvwire.v1 import peer_service_pb2 as peer

RUN = b"i" * 16


@pytest.mark.parametrize("tokens", [False, True])
def test_a_batch_made_of_bytes_is_what_the_schema_says(tokens):
    keys = wire.Keys(1, 1500).batch(0)
    raw = wire.store_report("server", RUN, 7, keys, tokens=tokens, tier=2)
    batch = pb.ReportEventsRequest.FromString(raw).batch
    assert (batch.server_id, batch.incarnation, batch.sequence, batch.lost) == ("server", RUN, 7, 0)
    assert [event.chunk_key for event in batch.events] == [keys[at : at + 32] for at in range(0, 32_000, 32)]
    for event in batch.events:
        assert (event.kind, event.tier, event.backend) == (event_pb2.CACHE_EVENT_KIND_STORE, 2, "memory")
        assert event.size_bytes == wire.CHUNK_BYTES
        assert len(event.tokens) == (1024 if tokens else 0)
        assert len(event.parent_key) == len(event.namespace_root) == 32


def test_a_page_made_of_bytes_is_what_the_schema_says():
    keys = wire.Keys(1, 3).batch(0)
    page = peer.SnapshotPlacementsResponse.FromString(wire.page("server", RUN, 9, keys))
    assert (page.server_id, page.incarnation, page.sequence) == ("server", RUN, 9)
    assert b"".join(event.chunk_key for event in page.placements) == keys


def test_keys_follow_from_the_seed():
    keys = wire.Keys(5, 2500, given=b"g" * 32 * 1001)
    again = wire.Keys(5, 2500, given=b"g" * 32 * 1001)
    assert keys.batches() == 3
    assert [len(keys.batch(number)) // 32 for number in range(3)] == [1000, 1000, 500]
    assert [keys.batch(number) for number in range(3)] == [again.batch(number) for number in range(3)]
    assert keys.batch(0) == b"g" * 32_000
    assert keys.batch(1).startswith(b"g" * 32)
    every = b"".join(keys.batch(number) for number in range(1, 3))
    assert len({every[at : at + 32] for at in range(32, len(every), 32)}) == 1499


def test_an_owner_evicts_what_was_used_longest_ago():
    owner = staleness.Owner(2)
    store, delete = staleness.STORE, staleness.DELETE
    assert owner.access(1) == [(store, 1)]
    assert owner.access(2) == [(store, 2)]
    assert owner.access(1) == []
    assert owner.access(3) == [(delete, 2), (store, 3)]
    assert list(owner.held) == [1, 3]
    assert owner.evicted == 1


def test_popular_chunks_are_asked_for_more_often():
    drawn = staleness.Popularity(size=100, skew=1.0, seed=3).draw(20_000)
    assert min(drawn) == 0
    assert max(drawn) < 100
    assert 1.5 < drawn.count(0) / drawn.count(1) < 2.7


def test_a_hint_fails_when_the_owner_does_not_hold_it():
    tally = staleness.Tally()
    for told, true in [(True, True), (True, False), (False, True), (False, False)]:
        tally.note(told, true)
    assert (tally.hints, tally.failed, tally.held, tally.untold) == (2, 1, 2, 1)


def test_summaries_are_milliseconds():
    assert probe.summary([0.001, 0.002, 0.01]) == {"p50_ms": 2.0, "p99_ms": 10.0, "max_ms": 10.0}
    assert probe.summary([]) == {"p50_ms": 0.0, "p99_ms": 0.0, "max_ms": 0.0}
