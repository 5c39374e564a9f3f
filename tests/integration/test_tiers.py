"""A server with a lower tier: what it keeps, and what it says of it."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvwire.server.tiers.backends.folder import FolderBackend
from support.local_server import MIB, local_server
from support.raw_client import OBJECT_BYTES, RawClient, content, tokens
from support.server_process import server_process
from support.waiting import eventually

STORED = OBJECT_BYTES + 64
MANIFEST = 4096


def written(client: RawClient, objects: int):
    """The only tier's status once it has so many objects and waits for no other."""

    def look():
        (tier,) = client.status().tiers
        return tier if tier.objects == objects and not tier.queued_objects else None

    return eventually(look)


def files(folder) -> dict[str, int]:
    found = {
        str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()
    }
    return {name: size for name, size in found.items() if not name.startswith(".")}


def tier_of(folder, **query) -> str:
    asked = {"size": "64MiB", **query}
    return f"file://{folder}?" + "&".join(f"{name}={value}" for name, value in asked.items())


def test_bl49_a_killed_server_finds_what_it_has_written(short_tmp):
    folder = short_tmp / "kv"
    flags = (f"--l2={tier_of(folder)}", "--server-id=a", "--chunk-size=4")
    with server_process(short_tmp, *flags) as server:
        client = RawClient(server.channel()).register("inline")
        client.store("s", tokens(6))
        written(client, 6)
        # In the middle of another store.
        client.lookup("t", tokens(6, seed=1))
        ticket = client.begin_store("t", 0, 6).ticket
        half = client.pieces(
            ticket, [content(key) for key in client.keys(tokens(6, seed=1))], 3 * OBJECT_BYTES
        )
        client.stub.WriteChunks(half, timeout=10)
        server.kill()
    with server_process(short_tmp, *flags) as server:
        client = RawClient(server.channel()).register("inline")
        reply = client.lookup("s", tokens(6))
        assert (reply.hit_chunks, reply.l2_chunks) == (6, 6)
        client.end_session("s")
        assert client.retrieve("s", tokens(6)) == [content(key) for key in client.keys(tokens(6))]
        assert client.lookup("t", tokens(6, seed=1)).hit_chunks == 0
        (tier,) = client.status().tiers
        assert tier.used_bytes == sum(files(folder).values()) == 6 * STORED + MANIFEST
        assert (tier.read_objects, tier.failed_reads, tier.damaged_objects) == (6, 0, 0)


def only(client: RawClient):
    (tier,) = client.status().tiers
    return tier


def check(server, folder=None) -> None:
    """All accounting agrees once nothing is under way, also with the folder."""
    server.run(lambda: server.core.tiers.flush(server.core.now() + 10))
    server.check()
    (tier,) = server.core.tiers.tiers
    server.run(tier.index.check_integrity)
    if folder is not None:
        eventually(lambda: not tier.index.doomed)
        assert server.run(lambda: tier.index.used) == sum(files(folder).values())


@pytest.mark.parametrize("policy", ["lru", "arc", "tenant"])
def test_bl52_what_leaves_memory_is_written_first(short_tmp, policy):
    folder = short_tmp / "kv"
    with local_server(short_tmp, l2=(tier_of(folder, store="evict"),), policy=policy, l1_size=MIB) as server:
        server.run(server.core.sealer.hurry)
        client = RawClient(server.channel()).register("inline")
        for seed in range(8):
            client.store(f"s{seed}", tokens(5, seed))
        assert only(client).skipped_objects == 0
        assert only(client).objects >= 8 * 5 - 16
        for seed in range(8):
            packed = tokens(5, seed)
            assert client.retrieve(f"s{seed}", packed) == [content(key) for key in client.keys(packed)]
        assert (only(client).skipped_objects, only(client).failed_reads) == (0, 0)
        assert server.status().l1.used_bytes <= MIB
        check(server, folder)


def test_nothing_is_written_before_it_has_to_leave(short_tmp):
    with local_server(short_tmp, l2=(tier_of(short_tmp / "kv", store="evict"),), l1_size=MIB) as server:
        client = RawClient(server.channel()).register("inline")
        client.store("s", tokens(5))
        for _ in range(3):
            server.sweep()
        assert only(client).objects == 0
        # In the background from the watermark on.
        client.store("t", tokens(8, seed=1))
        client.store("u", tokens(2, seed=2))
        eventually(lambda: only(client).objects and server.status().l1.used_bytes <= 0.95 * MIB)
        assert client.hits(tokens(8, seed=1)) == 8


def test_bl52_a_storage_that_fails_holds_no_store_up(short_tmp):
    folder = short_tmp / "kv"
    with local_server(short_tmp, l2=(tier_of(folder, store="evict"),), l1_size=MIB) as server:
        client = RawClient(server.channel()).register("inline")
        folder.chmod(0o500)
        (folder / ".unfinished").rename(short_tmp / "unfinished")
        folder.chmod(0o700)
        (folder / ".unfinished").write_text("in the way")
        for seed in range(8):
            assert client.store(f"s{seed}", tokens(5, seed)) == 5
        assert client.hits(tokens(5, 7)) == 5
        tier = only(client)
        assert tier.objects == 0
        assert tier.skipped_objects + tier.failed_writes >= 8 * 5 - 16
        assert "cannot be written to" in tier.problem
        (folder / ".unfinished").unlink()
        server.sweep()
        eventually(lambda: not only(client).problem)
        check(server, folder)


def test_bl52_a_restore_evicts_what_it_needs_to(short_tmp):
    with local_server(
        short_tmp, l2=(tier_of(short_tmp / "kv"),), l1_size=28 * OBJECT_BYTES, watermark=1.0
    ) as server:
        client = RawClient(server.channel()).register("inline")
        client.store("a", tokens(11))
        written(client, 11)
        server.run(server.engine.clear)
        client.store("b", tokens(18, seed=1))
        reply = client.lookup("a", tokens(11))
        assert (reply.hit_chunks, reply.l2_chunks) == (11, 11)
        assert client.hits(tokens(18, seed=1)) == 17


def test_a_stopped_server_has_written_what_waited(short_tmp):
    folder = short_tmp / "kv"
    flags = {"l2": (tier_of(folder),), "server_id": "a", "drain": 5.0}
    with local_server(short_tmp, **flags) as server:
        client = RawClient(server.channel()).register("shm")
        client.store("s", tokens(5))
    with local_server(short_tmp, **flags) as server:
        client = RawClient(server.channel()).register("inline")
        assert client.retrieve("s", tokens(5)) == [content(key) for key in client.keys(tokens(5))]
        check(server, folder)


def test_a_stopped_server_writes_what_it_holds_under_the_policy_evict(short_tmp):
    flags = {"l2": (tier_of(short_tmp / "kv", store="evict"),), "server_id": "a", "drain": 5.0}
    with local_server(short_tmp, **flags) as server:
        client = RawClient(server.channel()).register("shm")
        client.store("s", tokens(5))
        assert only(client).objects == 0
    with local_server(short_tmp, **flags) as server:
        client = RawClient(server.channel()).register("inline")
        reply = client.lookup("s", tokens(5))
        assert (reply.hit_chunks, reply.l2_chunks) == (5, 5)


def test_many_clients_over_two_small_tiers_read_nothing_wrong(short_tmp):
    disk, second = short_tmp / "disk", short_tmp / "second"
    urls = (tier_of(disk, store="evict", size="3MiB"), tier_of(second, name="second", size="2MiB"))
    with local_server(short_tmp, l2=urls, l1_size=2 * MIB) as server:

        def work(number: int) -> int:
            dice = random.Random(number)
            client = RawClient(server.channel(), f"engine {number}").register("inline")
            right = 0
            for step in range(40):
                packed = tokens(dice.randrange(1, 8), seed=dice.randrange(12))
                session = f"{number}-{step}"
                if dice.random() < 0.5:
                    client.store(session, packed)
                else:
                    found = client.retrieve(session, packed)
                    assert found is not None
                    assert found == [content(key) for key in client.keys(packed)[: len(found)]]
                    right += len(found)
            return right

        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(work, range(4))) > 0
        client = RawClient(server.channel()).register("inline")
        server.run(lambda: server.core.tiers.flush(server.core.now() + 10))
        server.check()
        for tier, folder in zip(server.core.tiers.tiers, (disk, second), strict=True):
            eventually(lambda tier=tier: not tier.index.doomed)
            server.run(tier.index.check_integrity)
            assert server.run(lambda tier=tier: tier.index.used) == sum(files(folder).values())
        for each in client.status().tiers:
            assert (each.damaged_objects, each.failed_reads, each.failed_writes) == (0, 0, 0)
            assert each.written_objects


@pytest.mark.leakcheck
@pytest.mark.parametrize("store", ["all", "evict"])
def test_a_storage_that_hangs_does_not_hold_the_stop_up(short_tmp, monkeypatch, store):
    begun = threading.Event()

    async def hang(*_):
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(FolderBackend, "write", hang)
    with local_server(short_tmp, l2=(tier_of(short_tmp / "kv", store=store),), drain=0.3) as server:
        server.run(server.core.sealer.hurry)
        client = RawClient(server.channel()).register("inline")
        client.store("s", tokens(9))
        if store == "all":
            assert begun.wait(10)
    assert begun.is_set()
    assert files(short_tmp / "kv") == {}


def test_bl52_a_store_as_large_as_memory_waits_for_no_slow_disk(short_tmp, monkeypatch):
    begun = threading.Event()

    async def hang(*_):
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(FolderBackend, "write", hang)
    with local_server(short_tmp, l2=(tier_of(short_tmp / "kv"),), l1_size=MIB) as server:
        server.run(server.core.sealer.hurry)
        client = RawClient(server.channel()).register("inline")
        client.store("s", tokens(16))
        assert begun.wait(10)
        assert client.store("t", tokens(16, seed=1)) == 16
        server.run(server.engine.store.check_integrity)
