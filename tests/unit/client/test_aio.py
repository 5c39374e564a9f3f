from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from kvwire import errors
from kvwire.client import (
    AsyncClient,
    CommitItem,
    EndRetrieveItem,
    GroupKind,
    KvGroup,
    KvLayout,
    Offer,
    Path,
    Registration,
    ReleaseItem,
    Role,
    SessionRange,
    TransferItem,
)
from kvwire.errors import Unavailable
from kvwire.keys import Namespace
from kvwire.v1 import cache_service_pb2 as pb
from support.fake_server import fake_server

NAMESPACE = Namespace("m")
LAYOUT = KvLayout((KvGroup(GroupKind.FULL_ATTENTION, 4, 2, 64, 2),))
REGISTRATION = Registration(
    b"c" * 16, "e", Role.STANDALONE, NAMESPACE, LAYOUT, chunk_size=8, offers=(Offer(Path.INLINE),)
)
TOKENS = range(32)


@pytest.fixture
def server(socket_path):
    with fake_server(f"unix:{socket_path}") as running:
        yield running


@pytest.mark.asyncio
@pytest.mark.leakcheck("tasks")
async def test_the_whole_contract_in_order(server):
    async with AsyncClient(server.address, client_name="test", token="s3cret") as client:
        assert (await client.negotiate(4)).chunk_size == 8
        me = (await client.register(REGISTRATION)).registration_id
        attached = client.attach(me)
        assert (await anext(attached)).draining_s is None
        await attached.aclose()
        assert (await client.ping(me)).registration_known is True
        missed = await client.lookup(NAMESPACE, TOKENS, registration_id=me, session_id="s")
        assert (missed.asked_chunks, missed.hit_chunks) == (4, 0)
        ticket = (await client.begin_store(me, [TransferItem(SessionRange("s", 0, 4))]))[0].ticket

        async def pieces():
            for i, slot in enumerate(ticket.slots):
                yield pb.WriteChunksRequest(
                    registration_id=me, lease_id=ticket.lease_id, slot=i, data=bytes([i]) * slot.size_bytes
                )

        assert await client.write_chunks(pieces()) == 4 * 128
        done = await client.commit_store(me, [CommitItem(ticket.lease_id, (0, 1, 2, 3))])
        assert done[0].committed == 4
        found = await client.lookup(NAMESPACE, TOKENS, registration_id=me, session_id="s")
        assert (found.hit_tokens, found.expires_at > time.monotonic()) == (32, True)
        released = await client.release_lookup(me, [ReleaseItem("s", found.lease_id, 0, 2)])
        assert released[0].released_chunks == 2
        grant = (await client.begin_retrieve(me, [TransferItem(SessionRange("s", 3, 1))]))[0]
        got = b"".join([piece.data async for piece in client.read_chunks(me, [grant.ticket.lease_id])])
        assert got == b"\x03" * 128
        assert await client.end_retrieve(me, [EndRetrieveItem(grant.ticket.lease_id)]) == [True]
        assert await client.end_sessions(me, ["s"]) == 1
        assert (await client.status()).server_version == "fake"
        await client.unregister(me)
    for method in ("Ping", "Attach", "WriteChunks", "ReadChunks"):
        assert server.metadata[method]["authorization"] == "Bearer s3cret", method


@pytest.mark.asyncio
async def test_errors_are_typed_and_deadlines_kept(server):
    async with AsyncClient(server.address, deadlines={"Attach": 0.2}) as client:
        with pytest.raises(errors.NotRegistered):
            await client.lookup(NAMESPACE, TOKENS, registration_id=9, session_id="s")
        with pytest.raises(errors.NotRegistered):
            _ = [piece async for piece in client.read_chunks(9, [1])]
        with pytest.raises(errors.NotRegistered):
            _ = [event async for event in client.attach(9)]
        server.delay["Lookup"] = 1.0
        with pytest.raises(errors.DeadlineExceeded, match="Lookup"):
            await client.lookup(NAMESPACE, TOKENS, timeout=0.1)
        server.hold["Attach"] = threading.Event()
        with pytest.raises(errors.DeadlineExceeded):
            _ = [event async for event in client.attach(9)]
    with pytest.raises(Unavailable, match="closed"):
        await client.ping()


@pytest.mark.asyncio
async def test_reads_are_repeated_once(server):
    async with AsyncClient(server.address) as client:
        server.fail["Ping"] = server.fail["NegotiateChunkSize"] = Unavailable("busy")
        with pytest.raises(Unavailable):
            await client.ping()
        with pytest.raises(Unavailable):
            await client.negotiate(4)
    assert (server.calls["Ping"], server.calls["NegotiateChunkSize"]) == (2, 1)


@pytest.mark.asyncio
@pytest.mark.leakcheck("tasks")
async def test_a_cancelled_batch_gives_its_leases_back(server):
    async with AsyncClient(server.address) as client:
        await client.negotiate(4)
        me = (await client.register(REGISTRATION)).registration_id
        await client.lookup(NAMESPACE, range(800), registration_id=me, session_id="s")
        first = asyncio.Event()
        loop = asyncio.get_running_loop()
        begin = server.BeginStore

        def second_hangs(request, context):
            if server.calls["BeginStore"] == 1:
                loop.call_soon_threadsafe(first.set)
                server.hold["BeginStore"] = threading.Event()
            return begin(request, context)

        server.BeginStore = second_hangs
        server.restart(keep=True)
        items = [TransferItem(SessionRange("s", i, 1)) for i in range(100)]
        task = asyncio.create_task(client.begin_store(me, items))
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while server.calls["AbortStore"] == 0:  # noqa: ASYNC110 - the server is on another thread
            await asyncio.sleep(0.01)
    assert len(server.requests["AbortStore"][0].lease_ids) == 64


def test_bl61_made_before_the_loop_and_used_in_two(server):
    client = AsyncClient(server.address)

    async def work():
        first = await client.ping()
        return first.chunk_size

    assert asyncio.run(work()) == 8
    assert asyncio.run(work()) == 8
    found = []
    threads = [threading.Thread(target=lambda: found.append(asyncio.run(work()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [8, 8]
    asyncio.run(client.close())


@pytest.mark.asyncio
async def test_kv_caches_over_asyncio(server):
    kv = [np.random.default_rng(1).integers(0, 255, (32, 64), dtype=np.uint8) for _ in range(2)]
    async with AsyncClient(server.address) as client:
        made = await client.register_kv_caches(kv, model="m", block_size=4, data_path="inline")
        async with made as cache:
            assert (cache.is_healthy, cache.chunk_size, cache.data_path) == (True, 8, "inline")
            with await cache.session(TOKENS) as session:
                assert (await asyncio.to_thread(session.store, range(8))).stored == 4
            with await cache.session(TOKENS) as session:
                assert session.hit_tokens == 32
    assert not server.registrations
