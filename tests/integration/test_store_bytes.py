"""What becomes of bytes on their way in and out: short, damaged, late, or of nobody."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest

from kvwire.errors import TransferFailed
from kvwire.transfer.checksum import checksum
from kvwire.v1 import cache_service_pb2 as pb
from kvwire.v1 import error_reason_pb2 as reasons
from support.local_server import local_server
from support.raw_client import CALL_S, OBJECT_BYTES, RawClient, content, failure, tokens
from support.waiting import eventually


@pytest.fixture
def client(local):
    return RawClient(local.channel()).register("inline")


def no_leases(local):
    status = local.status()
    assert not any(status.leases.values()), status.leases
    assert not status.waiting_leases
    local.check()


def test_a_refused_commit_leaves_the_lease_and_what_was_not_sent_is_never_published(local, client):
    packed = tokens(2)
    client.lookup("s", packed)
    ticket = client.begin_store("s", 0, 2).ticket
    data = [content(key) for key in client.keys(packed)]
    client.write(ticket, data[:1])
    assert client.commit(ticket.lease_id, [0, 7]).error.reason == reasons.ERROR_REASON_RANGE_INVALID
    short = client.commit(ticket.lease_id, [0, 1], [bytes(16)])
    assert short.error.reason == reasons.ERROR_REASON_INVALID_FIELD
    result = client.commit(ticket.lease_id)
    assert (result.committed, result.aborted, list(result.failed_slots)) == (1, 1, [1])
    assert result.error.reason == reasons.ERROR_REASON_TRANSFER_FAILED
    assert client.hits(packed) == 1
    assert client.retrieve("r", packed) == data[:1]
    client.end_session("s")
    no_leases(local)


def test_memory_waits_until_the_data_path_has_let_go_of_it(local, client):
    """A path that takes its time: the reply does not wait, the memory does."""
    packed = tokens(2)
    client.lookup("s", packed)
    ticket = client.begin_store("s", 0, 2).ticket
    client.write(ticket, [content(key) for key in client.keys(packed)])
    path, let_go = local.core.plane.path("inline"), local.run(asyncio.Event)
    real, cancelled = path.cancel, []

    async def slow(lease_id):
        cancelled.append(lease_id)
        await let_go.wait()
        await real(lease_id)

    path.cancel = slow
    result = client.commit(ticket.lease_id, [0])
    assert (result.committed, result.aborted) == (1, 1)
    assert local.status().l1.quarantined_bytes == OBJECT_BYTES
    assert cancelled == [ticket.lease_id]
    local.run(let_go.set)
    eventually(lambda: not local.status().l1.quarantined_bytes)
    assert client.hits(packed) == 1
    del path.cancel
    client.end_session("s")
    no_leases(local)


def test_a_data_path_that_cannot_open_a_lease_leaves_none(local, client):
    def refuse(*_args):
        raise TransferFailed("a test says so", path="inline", cause="test")

    path = local.core.plane.path("inline")
    client.store("first", tokens(1))
    path.open_store = path.open_retrieve = refuse
    client.lookup("s", tokens(2))
    assert client.begin_store("s", 0, 2).error.reason == reasons.ERROR_REASON_TRANSFER_FAILED
    assert client.begin_retrieve("s", 0, 1).error.reason == reasons.ERROR_REASON_TRANSFER_FAILED
    del path.open_store, path.open_retrieve
    client.end_session("s")
    eventually(lambda: not local.status().waiting_leases)
    no_leases(local)


def test_a_stream_of_pieces_without_pieces_ends(short_tmp):
    with local_server(short_tmp, write_lease=0.3) as local:
        client = RawClient(local.channel()).register("inline")
        client.lookup("s", tokens(1))
        ticket = client.begin_store("s", 0, 1).ticket
        never = threading.Event()

        def pieces():
            yield next(client.pieces(ticket, [b"a"]))
            never.wait()

        failed = failure(client.stub.WriteChunks, pieces(), timeout=CALL_S)
        never.set()
        assert failed.reason == "TRANSFER_TIMEOUT"
        eventually(lambda: local.core.guard.in_flight == 0)


def test_a_reader_that_does_not_read_is_given_up(short_tmp):
    """Its call would count as one in flight for as long as it is connected."""
    with local_server(short_tmp, l1_size=64 << 20, read_lease=0.3) as local:
        client = RawClient(local.channel()).register("inline", object_bytes=24 << 20)
        client.store("first", tokens(2))
        client.lookup("s", tokens(2))
        lease_id = client.begin_retrieve("s", 0, 2).ticket.lease_id
        request = pb.ReadChunksRequest(registration_id=client.registration_id, lease_ids=[lease_id])
        pieces = client.stub.ReadChunks(request, timeout=2)
        assert next(pieces).data
        eventually(lambda: local.core.guard.in_flight == 0, within=1.5)
        assert failure(list, pieces).code == grpc.StatusCode.DEADLINE_EXCEEDED
        assert not client.end_retrieve(lease_id)
        client.end_session("s")
        no_leases(local)


def test_pieces_must_fit_their_slot(local, client):
    client.lookup("s", tokens(1))
    ticket = client.begin_store("s", 0, 1).ticket

    def write(slot, offset, data):
        piece = pb.WriteChunksRequest(
            registration_id=client.registration_id,
            lease_id=ticket.lease_id,
            slot=slot,
            offset=offset,
            data=data,
        )
        return client.stub.WriteChunks(iter([piece]), timeout=CALL_S)

    for slot, offset, data in (
        (1, 0, b"x"),
        (0, 0, b""),
        (0, 1, b"x"),
        (0, OBJECT_BYTES, b"x"),
        (0, 0, bytes(OBJECT_BYTES + 1)),
        (0, (1 << 64) - 1, b"xx"),
        (4_000_000_000, 0, b"x"),
    ):
        assert failure(write, slot, offset, data).reason == "RANGE_INVALID"
    assert write(0, 0, bytes(OBJECT_BYTES)).written_bytes == OBJECT_BYTES
    # A slot that is complete is not written again.
    assert failure(write, 0, 0, b"x").reason == "RANGE_INVALID"


def test_damage_that_a_reader_reports_is_checked_before_it_is_believed(local, client):
    packed = tokens(2)
    client.lookup("s", packed)
    ticket = client.begin_store("s", 0, 2).ticket
    data = [content(key) for key in client.keys(packed)]
    client.write(ticket, data)
    assert client.commit(ticket.lease_id, [0, 1], [checksum(each) for each in data]).committed == 2
    client.lookup("s", packed)
    reading = client.begin_retrieve("s", 0, 2).ticket
    assert [slot.checksum for slot in reading.slots] == [checksum(each) for each in data]
    assert client.end_retrieve(reading.lease_id, corrupt=[0, 1, 9])
    assert client.hits(packed) == 2
    reading = client.begin_retrieve("s", 0, 2).ticket
    (_, second) = local.run(local.engine.live_lease, client.registration_id, reading.lease_id, 0.0).objects
    local.core.arena.view(second.offset, 1)[:] = b"\x00" if data[1][:1] != b"\x00" else b"\x01"
    assert not client.end_retrieve(reading.lease_id, corrupt=[1])
    assert client.hits(packed) == 1
