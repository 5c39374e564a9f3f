from __future__ import annotations

import asyncio
from hashlib import sha256

import pytest

from kvwire.coordinator.fleet import Fleet
from kvwire.coordinator.intake import Intake
from kvwire.coordinator.messages import ServerInfo
from kvwire.coordinator.watching import MAX_QUEUED, EventWatchers
from kvwire.errors import Draining, InvalidArgument, Overloaded, ServerNotRegistered, TooManyItems
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import event_pb2

RUN = b"i" * 16


def batch(sequence, count=1, **more):
    events = [
        event_pb2.CacheEvent(
            kind=1,
            chunk_key=sha256(b"%d/%d" % (sequence, n)).digest(),
            tier=1,
            backend="memory",
            size_bytes=1,
        )
        for n in range(count)
    ]
    return event_pb2.CacheEventBatch(server_id="a", incarnation=RUN, sequence=sequence, events=events, **more)


@pytest.fixture
def fleet():
    fleet = Fleet()
    fleet.register(ServerInfo("a", RUN, chunk_size=4, digest="sha256"), 0.0)
    (pull,) = fleet.pulls(0.0)
    fleet.pull_page(pull, RUN, 0, [], 0.0)
    fleet.end_pull(pull, 0.0)
    return fleet


async def begun(fleet):
    for _ in range(10):
        await asyncio.sleep(0)
    assert 0 < fleet.directory.stats().placements < 5000


@pytest.mark.asyncio
async def test_others_come_in_between_the_slices_of_a_large_batch(fleet):
    intake = Intake(fleet, lambda _: None)
    taking = asyncio.create_task(intake.take(batch(1, 10_000), "rpc"))
    turns = 0
    while not taking.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 30
    assert fleet.directory.stats().placements == 10_000


@pytest.mark.asyncio
async def test_what_a_sender_began_is_applied_although_it_goes_away(fleet):
    """It was admitted: sent again, it is a duplicate, and what had not been applied would be lost."""
    intake = Intake(fleet, lambda _: None)
    taking = asyncio.create_task(intake.take(batch(1, 5000), "rpc"))
    await begun(fleet)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    reply = await intake.take(batch(1, 5000), "rpc")
    assert reply.admission == pb.EVENT_ADMISSION_DUPLICATE
    assert fleet.directory.stats().placements == 5000
    fleet.directory.check_integrity()


@pytest.mark.asyncio
async def test_a_server_that_leaves_within_its_batch_leaves_nothing(fleet):
    intake = Intake(fleet, lambda _: None)
    taking = asyncio.create_task(intake.take(batch(1, 5000), "rpc"))
    await begun(fleet)
    fleet.deregister("a", RUN)
    assert (await taking).admission == pb.EVENT_ADMISSION_STALE_INCARNATION
    assert fleet.directory.stats().placements == 0
    fleet.directory.check_integrity()


@pytest.mark.asyncio
async def test_a_gap_asks_for_a_snapshot_at_once(fleet):
    asked = []
    intake = Intake(fleet, lambda _: None, lambda: asked.append(True))
    await intake.take(batch(1), "kafka")
    assert not asked
    assert (await intake.take(batch(3), "kafka")).admission == pb.EVENT_ADMISSION_GAP
    assert asked
    assert intake.stats.batches == {"kafka": 2}


@pytest.mark.asyncio
async def test_bad_batches_change_nothing(fleet):
    intake = Intake(fleet, lambda _: None)
    with pytest.raises(InvalidArgument):
        await intake.take_raw(b"\xff\xff")
    with pytest.raises(InvalidArgument, match="sequence"):
        await intake.take(batch(0), "rpc")
    with pytest.raises(TooManyItems):
        await intake.take(batch(1, 10_001), "rpc")
    stranger = batch(1)
    stranger.server_id = "stranger"
    with pytest.raises(ServerNotRegistered):
        await intake.take(stranger, "rpc")
    assert fleet.directory.stats().placements == 0
    assert (await intake.take(batch(1), "rpc")).sequence == 1


@pytest.mark.asyncio
async def test_a_watcher_that_reads_nothing_misses_events_and_is_told_how_many(fleet):
    watchers = EventWatchers(1)
    intake = Intake(fleet, watchers.tell)
    stream = watchers.follow("")
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await anext(watchers.follow(""))
    await intake.take(batch(1), "rpc")
    assert (await first).stored_chunks == 1
    for sequence in range(2, MAX_QUEUED + 5):
        await intake.take(batch(sequence), "rpc")
    told = await anext(stream)
    assert (told.sequence, told.missed) == (5, 3)
    assert (await anext(stream)).missed == 0
    watchers.close()
    with pytest.raises(Draining):
        async for _ in stream:
            pass
    assert len(watchers) == 0
