"""Faults that others have had with what lies below the memory, against a folder."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import urllib.request
from itertools import takewhile

import grpc
import pytest

from kvwire.cli import app
from kvwire.errors import ConfigError
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import event_pb2
from support.fleet import LocalCoordinator
from support.local_server import local_server
from support.raw_client import OBJECT_BYTES, RawClient, content, failure, tokens
from support.server_process import server_process
from support.waiting import eventually

STORED = OBJECT_BYTES + 64
MANIFEST = 4096
MIB = 1 << 20
NOBODY = ("127.0.0.1:9",)


def url(folder, **query) -> str:
    asked = {"size": "64MiB", **query}
    return f"file://{folder}?" + "&".join(f"{name}={value}" for name, value in asked.items())


def files(folder) -> dict[str, int]:
    found = {
        str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()
    }
    return {name: size for name, size in found.items() if not name.startswith(".")}


def file_of(folder, key: bytes):
    return next(folder.rglob(f"{key.hex()}.0"))


def tier(client: RawClient, name: str = ""):
    return next(each for each in client.status().tiers if name in ("", each.backend))


def written(client: RawClient, objects: int, name: str = "") -> None:
    eventually(lambda: tier(client, name).objects == objects and not tier(client, name).queued_objects)


def told(server) -> list[tuple[int, bytes]]:
    """What the journal has of the lower tier, since it was asked last."""
    return server.run(_told, server)


def _told(server) -> list[tuple[int, bytes]]:
    server.core.journal.close()
    events = [
        event
        for closed in server.reader.take(1000)
        for event in event_pb2.CacheEventBatch.FromString(closed.payload).events
    ]
    return [
        (event.kind, event.chunk_key)
        for event in events
        if event.tier == event_pb2.STORAGE_TIER_L2 and event.kind in (STORE, DELETE)
    ]


STORE, DELETE = event_pb2.CACHE_EVENT_KIND_STORE, event_pb2.CACHE_EVENT_KIND_DELETE


@contextlib.contextmanager
def journaled(folder, *urls: str, **settings):
    """A server with something to tell, and a client of it."""
    with local_server(folder, l2=urls, coordinator=NOBODY, peers=False, **settings) as server:
        server.reader = server.run(server.core.journal.reader)
        server.run(server.core.sealer.hurry)
        client = RawClient(server.channel()).register("inline")
        yield server, client
        # What is being written is held, by no lease.
        server.run(lambda: server.core.tiers.flush(server.core.now() + 10))
        server.check()
        for each in server.core.tiers.tiers:
            eventually(lambda each=each: not each.index.doomed)
            server.run(each.index.check_integrity)


def drop_memory(server) -> None:
    assert server.run(server.engine.clear)[1] == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "header", "empty"])
def test_bl49_damaged_files_are_misses_and_are_told(short_tmp, damage):
    folder = short_tmp / "kv"
    with journaled(short_tmp, url(folder)) as (server, client):
        packed = tokens(5)
        client.store("s", packed)
        written(client, 5)
        keys = client.keys(packed)
        assert sorted(told(server)) == sorted((STORE, key) for key in keys)
        drop_memory(server)
        harm(file_of(folder, keys[2]), damage)
        reply = client.lookup("s", packed)
        assert (reply.hit_chunks, reply.l2_chunks) == (2, 2)
        client.end_session("s")
        assert told(server) == [(DELETE, keys[2])]
        eventually(lambda: sum(files(folder).values()) == tier(client).used_bytes == 4 * STORED + MANIFEST)
        assert (tier(client).damaged_objects, tier(client).failed_reads) == (1, 1)
        # What is computed anew takes its place, and the rest of the prompt is good again.
        client.store("s", packed)
        written(client, 5)
        drop_memory(server)
        assert client.retrieve("s", packed) == [content(key) for key in keys]


def harm(path, damage: str) -> None:
    data = bytearray(path.read_bytes())
    if damage == "delete":
        path.unlink()
        return
    if damage == "flip":
        data[-1] ^= 1
    elif damage == "header":
        data[0] ^= 1
    path.write_bytes(b"" if damage == "empty" else data[:-1] if damage == "cut" else data)


def test_bl19_what_a_dead_client_has_left_is_never_written(short_tmp):
    folder = short_tmp / "kv"
    with journaled(short_tmp, url(folder)) as (server, client):
        packed = tokens(4)
        client.lookup("s", packed)
        ticket = client.begin_store("s", 0, 4).ticket
        half = client.pieces(ticket, [content(key) for key in client.keys(packed)], OBJECT_BYTES + 1)
        client.stub.WriteChunks(half, timeout=10)
        server.run(server.engine.disconnect, client.registration_id, server.core.now())
        server.sweep()
        told(server)
        other = RawClient(server.channel(), "other").register("inline")
        assert other.store("t", packed) == 4
        written(other, 4)
        assert sorted(told(server)) == sorted((STORE, key) for key in other.keys(packed))
        assert sum(files(folder).values()) == 4 * STORED + MANIFEST


def test_bl53_the_head_of_a_prompt_stays_below_too(short_tmp):
    # Room for 15 objects and the manifest.
    with journaled(short_tmp, url(short_tmp / "kv", size="1MiB")) as (server, client):
        packed = tokens(8)
        client.lookup("s", packed)
        for first in range(0, 8, 2):
            ticket = client.begin_store("s", first, 2).ticket
            client.write(ticket, [content(key) for key in client.keys(packed)[first : first + 2]])
            client.commit(ticket.lease_id)
            written(client, first + 2)
        client.end_session("s")
        client.store("t", tokens(11, seed=1))
        eventually(lambda: tier(client).written_objects == 19)
        drop_memory(server)
        assert client.lookup("s", packed).hit_chunks == 4
        assert client.lookup("t", tokens(11, seed=1)).hit_chunks == 11
        client.end_session("s", "t")
        assert tier(client).evicted_chunks == 4


def test_bl53_a_hit_in_memory_keeps_the_prompt_below(short_tmp):
    with journaled(short_tmp, url(short_tmp / "kv", size="1MiB")) as (server, client):
        client.store("old", tokens(5))
        client.store("older", tokens(5, seed=1))
        client.store("new", tokens(5, seed=2))
        written(client, 15)
        client.lookup("old", tokens(5))
        client.store("more", tokens(3, seed=3))
        eventually(lambda: tier(client).written_objects == 18)
        client.end_session("old")
        drop_memory(server)
        hits = {seed: client.lookup(f"l{seed}", tokens(5, seed=seed)).hit_chunks for seed in range(3)}
        assert hits == {0: 5, 1: 2, 2: 5}


def test_bl55_tenants_find_their_own_below_the_memory(short_tmp):
    folder = short_tmp / "kv"
    with journaled(short_tmp, url(folder), server_id="a") as (server, client):
        client.store("s", tokens(3), salt="secret-salt")
        written(client, 3)
        drop_memory(server)
        assert client.lookup("a", tokens(3)).hit_chunks == 0
        assert client.lookup("b", tokens(3), salt="other").hit_chunks == 0
        assert client.lookup("c", tokens(3), salt="secret-salt").l2_chunks == 3
        client.end_session("a", "b", "c")
    everything = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    names = " ".join(str(path) for path in folder.rglob("*"))
    assert b"secret-salt" not in everything
    assert "secret" not in names
    assert "model" not in names
    with journaled(short_tmp, url(folder), server_id="a") as (_, client):
        assert client.lookup("a", tokens(3)).hit_chunks == 0
        assert client.lookup("c", tokens(3), salt="secret-salt").l2_chunks == 3


def test_two_tiers_each_have_what_is_stored_and_stand_in_for_each_other(short_tmp):
    folder, other = short_tmp / "kv", short_tmp / "other"
    with journaled(short_tmp, url(folder), url(other, name="second")) as (server, client):
        packed = tokens(4)
        client.store("s", packed)
        written(client, 4, "disk")
        written(client, 4, "second")
        drop_memory(server)
        keys = client.keys(packed)
        file_of(folder, keys[1]).unlink()
        harm(file_of(folder, keys[2]), "flip")
        assert client.retrieve("s", packed) == [content(key) for key in keys]
        assert tier(client, "disk").damaged_objects == 2
        # It is in memory again, so the first tier gets it back.
        written(client, 4, "disk")
        assert tier(client, "second").read_objects == 2


def test_a_tier_that_is_not_asked_is_still_written(short_tmp):
    with journaled(short_tmp, url(short_tmp / "kv", fetch="no")) as (server, client):
        client.store("s", tokens(2))
        written(client, 2)
        drop_memory(server)
        assert client.lookup("s", tokens(2)).hit_chunks == 0


def test_a_folder_belongs_to_one_server(short_tmp):
    with journaled(short_tmp, url(short_tmp / "kv")) as (_, client):
        second = short_tmp / "second"
        second.mkdir()
        with (
            pytest.raises(ConfigError, match="another server uses the folder"),
            local_server(second, l2=(url(short_tmp / "kv"),)),
        ):
            pass
        client.store("s", tokens(2))
        written(client, 2)


def test_a_chunk_is_told_and_found_when_all_ranks_are_there(short_tmp):
    folder = short_tmp / "kv"
    packed = tokens(3)
    with journaled(short_tmp, url(folder), server_id="a") as (server, client):
        client.unregister()
        ranks = [
            RawClient(server.channel()).register("inline", "worker", world_size=2, kv_rank=rank)
            for rank in range(2)
        ]
        scheduler = RawClient(server.channel()).register("", "scheduler", world_size=2)
        for number, rank in enumerate(ranks):
            scheduler.lookup("s", packed)
            ticket = rank.begin_store("s", 0, 3).ticket
            rank.write(ticket, [content(key) for key in rank.keys(packed)])
            rank.commit(ticket.lease_id)
            scheduler.end_session("s")
            written(rank, 3 * (number + 1))
            drop_memory(server)
            assert sorted(told(server)) == sorted((STORE, key) for key in rank.keys(packed) if number)
            if not number:
                assert scheduler.lookup("s", packed).hit_chunks == 0
                scheduler.end_session("s")
    assert sum(files(folder).values()) == 6 * STORED + MANIFEST
    with journaled(short_tmp, url(folder), server_id="a") as (server, client):
        client.unregister()
        worker = RawClient(server.channel()).register("inline", "worker", world_size=2, kv_rank=1)
        scheduler = RawClient(server.channel()).register("", "scheduler", world_size=2)
        reply = scheduler.lookup("s", packed)
        assert (reply.hit_chunks, reply.l2_chunks) == (3, 3)
        result = worker.begin_retrieve("s", 0, 3)
        assert worker.read(result.ticket) == [content(key) for key in worker.keys(packed)]
        assert tier(worker).read_objects == 6
        # A file that one rank lacks is a boundary for all.
        worker.end_retrieve(result.ticket.lease_id)
        scheduler.end_session("s")
        drop_memory(server)
        next(folder.rglob(f"{worker.keys(packed)[1].hex()}.1")).unlink()
        assert scheduler.lookup("s", packed).hit_chunks == 1
        scheduler.end_session("s")
        assert told(server)[-1] == (DELETE, worker.keys(packed)[1])


def test_of_two_layouts_of_one_namespace_the_later_is_kept(short_tmp):
    folder = short_tmp / "kv"
    with journaled(short_tmp, url(folder)) as (server, client):
        client.store("s", tokens(3))
        written(client, 3)
        client.unregister()
        drop_memory(server)
        told(server)
        other = RawClient(server.channel()).register("inline", object_bytes=OBJECT_BYTES // 2)
        assert other.lookup("s", tokens(3)).hit_chunks == 0
        other.end_session("s")
        other.store("s", tokens(3))
        keys = other.keys(tokens(3))
        eventually(lambda: tier(other).written_objects == 6)
        events = told(server)
        assert [each for each in events if each[1] == keys[0]] == [(DELETE, keys[0]), (STORE, keys[0])]
        eventually(lambda: sum(files(folder).values()) == 3 * (OBJECT_BYTES // 2 + 64) + MANIFEST)


def located(coordinator, client, packed: bytes) -> dict[tuple[str, int], int]:
    """Chunks of a prompt by server and tier."""
    request = pb.LocateChunksRequest(chunk_keys=pb.LocateKeys(keys=client.keys(packed)), with_placements=True)
    reply = coordinator.stub().LocateChunks(request, timeout=10)
    found: dict[tuple[str, int], int] = {}
    for chunk in reply.chunks:
        for place in chunk.placements:
            found[place.backend, place.tier] = found.get((place.backend, place.tier), 0) + 1
    return found


def usage(coordinator) -> dict[str, int]:
    """Used bytes by store, as the only server's heartbeats tell."""
    (member,) = coordinator.stub().ListServers(pb.ListServersRequest(), timeout=10).members
    return {each.backend: each.used_bytes for each in member.tiers}


def test_a_directory_knows_what_lies_below_also_after_a_kill(short_tmp):
    folder = short_tmp / "kv"
    with LocalCoordinator(short_tmp) as coordinator:
        flags = (
            f"--l2={url(folder)}",
            "--server-id=a",
            "--chunk-size=4",
            "--event-interval=5ms",
            f"--coordinator={coordinator.address}",
        )
        with server_process(short_tmp, *flags) as server:
            client = RawClient(server.channel()).register("inline")
            client.store("s", tokens(3))
            client.store("t", tokens(2, seed=1))
            both = {("memory", 1): 3, ("disk", 2): 3}
            eventually(lambda: located(coordinator, client, tokens(3)) == both)
            eventually(lambda: ("disk", 2) in located(coordinator, client, tokens(2, seed=1)))
            eventually(
                lambda: usage(coordinator) == {"memory": 5 * OBJECT_BYTES, "disk": 5 * STORED + MANIFEST}
            )
            server.process.send_signal(signal.SIGKILL)
            server.process.wait(10)
        # What the next run does not find is told, too.
        keys = client.keys(tokens(2, seed=1))
        for key in keys:
            file_of(folder, key).unlink()
        with server_process(short_tmp, *flags) as server:
            client = RawClient(server.channel()).register("inline")
            eventually(lambda: located(coordinator, client, tokens(3)) == {("disk", 2): 3})
            eventually(lambda: located(coordinator, client, tokens(2, seed=1)) == {})
            assert client.lookup("s", tokens(3)).l2_chunks == 3
            eventually(lambda: located(coordinator, client, tokens(3)) == both)


def test_bl49_a_killed_server_leaves_no_half_written_file(short_tmp):
    folder = short_tmp / "kv"
    flags = (f"--l2={url(folder, size='1GiB')}", "--server-id=a", "--chunk-size=4", "--l1-size=128MiB")
    size = MIB
    with server_process(short_tmp, *flags) as server:
        client = RawClient(server.channel()).register("inline", object_bytes=size)
        client.store("s", tokens(10))
        eventually(lambda: tier(client).objects >= 2)
        unfinished = folder / ".unfinished"
        eventually(lambda: any(unfinished.iterdir()) or tier(client).objects == 10, every=0.0005)
        server.kill()
    before = files(folder)
    assert set(before.values()) <= {size + 64, MANIFEST}
    with server_process(short_tmp, *flags) as server:
        client = RawClient(server.channel()).register("inline", object_bytes=size)
        assert list((folder / ".unfinished").iterdir()) == []
        reply = client.lookup("s", tokens(10))
        keys = client.keys(tokens(10))[: reply.hit_chunks]
        client.end_session("s")
        assert client.retrieve("s", tokens(10)) == [content(key, size) for key in keys]
        assert tier(client).used_bytes == sum(before.values()) == sum(files(folder).values())
        # Several threads write: behind a hole there may be more.
        whole = takewhile(lambda key: any(folder.rglob(f"{key.hex()}.0")), client.keys(tokens(10)))
        assert reply.hit_chunks == len(list(whole))
        assert tier(client).damaged_objects == 0


def test_status_and_metrics_tell_of_each_tier(short_tmp, capsys, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    missing = "s3://nothing/there?size=1GiB&endpoint=http://127.0.0.1:9&region=r&store=evict"
    with journaled(short_tmp, url(short_tmp / "kv"), missing, http="127.0.0.1:0") as (server, client):
        client.store("s", tokens(3))
        written(client, 3, "disk")
        drop_memory(server)
        harm(file_of(short_tmp / "kv", client.keys(tokens(3))[2]), "cut")
        client.lookup("s", tokens(3))
        client.end_session("s")
        assert app.main(["status", "--address", server.address]) == 0
        told = capsys.readouterr().out
        assert "the lower tier 's3' cannot be used: " in told
        disk = next(line for line in told.splitlines() if line.startswith("disk file://")).split()
        assert disk[2:8] == ["132.1", "KiB", "64", "MiB", "2", "all"]
        assert "2 (128.1 KiB)" in " ".join(disk)
        assert "1 damaged" in " ".join(disk)
        with urllib.request.urlopen(f"http://{server.server.http_address}/metrics") as reply:
            lines = reply.read().decode().splitlines()
        assert 'kvwire_tier_objects{tier="disk"} 2.0' in lines
        assert 'kvwire_tier_damaged_objects_total{tier="disk"} 1.0' in lines
        assert 'kvwire_tier_problem{tier="s3"} 1.0' in lines
        assert 'kvwire_lookup_hit_tokens_total{tier="l2"} 8.0' in lines


@pytest.fixture
def small_disk(short_tmp):
    """A file system of 1 MiB."""
    target = short_tmp / "small"
    target.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "kvwire-test", str(target)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounts need privileges")
    yield target
    subprocess.run(["umount", str(target)], check=True)


def test_bl49_a_disk_that_is_full_holds_what_it_can(short_tmp, small_disk):
    with journaled(short_tmp, url(small_disk, size="64MiB")) as (server, client):
        for seed in range(4):
            client.store(f"s{seed}", tokens(8, seed=seed))
            eventually(lambda seed=seed: tier(client).written_objects == 8 * (seed + 1))
        there: dict[bytes, None] = {}
        for kind, key in told(server):
            there.pop(key, None)
            if kind == STORE:
                there[key] = None
        eventually(lambda: sum(files(small_disk).values()) == tier(client).used_bytes)
        assert list((small_disk / ".unfinished").iterdir()) == []
        assert {bytes.fromhex(name.split("/")[-1][:64]) for name in files(small_disk) if "." in name} == set(
            there
        )
        assert 8 <= len(there) <= 15
        drop_memory(server)
        # The last prompt is there, the first is a miss, and nothing is wrong.
        for seed in range(4):
            keys = client.keys(tokens(8, seed=seed))
            found = client.retrieve(f"l{seed}", tokens(8, seed=seed))
            assert found == [content(each) for each in keys[: len(found)]]
            assert len(found) == [*(each in there for each in keys), False].index(False)
        assert len(found) == 8
        assert tier(client).damaged_objects == 0


def test_bl50_whatever_models_and_tenants_are_called_they_are_kept_apart_inside_the_folder(short_tmp):
    folder = short_tmp / "kv"
    models = ("m/" * 70, "a/b", "a-SEP-b", "../../up")
    salts = ("", "../@", "\u00fc", "s" * 128)
    with journaled(short_tmp, url(folder)) as (server, first):
        clients = []
        for model in models:
            client = RawClient(server.channel(), f"engine of {model[:9]}")
            client.namespace.model = model
            clients.append(client.register("inline"))
        for client in clients:
            for salt in salts:
                assert client.store("s", tokens(2), salt) == 2
        written(first, 2 * len(models) * len(salts))
        drop_memory(server)
        for client in clients:
            for salt in salts:
                assert client.retrieve("s", tokens(2), salt) == [
                    content(key) for key in client.keys(tokens(2), salt)
                ]
        for salt in ("a\nb", "a\0b"):
            assert (
                failure(clients[0].lookup, "s", tokens(2), salt=salt).code is grpc.StatusCode.INVALID_ARGUMENT
            )
        assert {path.name for path in short_tmp.iterdir()} <= {"kv", "local.sock"}
        name = re.compile(r"[0-9a-f]{32}/[0-9a-f]{64}/[0-9a-f]{16}/(manifest|[0-9a-f]{64}\.0)")
        assert all(name.fullmatch(each) for each in files(folder))
        assert tier(first).read_objects == 2 * len(models) * len(salts)
