"""A real server over a real S3 protocol server and a real Redis, killed while it writes there."""

from __future__ import annotations

import os
import time

import pytest

from support.proxy import TcpProxy
from support.raw_client import OBJECT_BYTES, RawClient, content, tokens
from support.redis_server import redis_server
from support.s3_server import BUCKET, KEYS, s3_server
from support.server_process import run_server, server_process
from support.waiting import eventually

STORED = OBJECT_BYTES + 64
SEALED = 36 + 16


class S3:
    def __init__(self, server):
        self.server, self.address = server, server.address

    def url(self, address: str) -> str:
        return f"s3://{BUCKET}/kv?size=64MiB&endpoint=http://{address}&region=us-east-1"

    def sizes(self) -> dict[str, int]:
        found = self.server.client().list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return {entry["Key"]: entry["Size"] for entry in found}

    def value(self, name: str) -> bytes:
        return self.server.client().get_object(Bucket=BUCKET, Key=name)["Body"].read()

    def check(self) -> None:
        assert self.server.uploads() == []


class Redis:
    def __init__(self, server):
        self.server, self.address = server, server.address

    def url(self, address: str) -> str:
        return f"redis://{address}/kv?size=64MiB"

    def sizes(self) -> dict[str, int]:
        return {name: int(self.server.ask("strlen", name)) for name in self.server.ask("keys", "*").split()}

    def value(self, name: str) -> bytes:
        return self.server.raw("get", name)

    def check(self) -> None: ...


@pytest.fixture(params=["s3", "redis"])
def storage(request, monkeypatch):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    start, kind = {"s3": (s3_server, S3), "redis": (redis_server, Redis)}[request.param]
    with start() as server:
        yield kind(server)


def tier(client: RawClient):
    (only,) = client.status().tiers
    return only


def objects(sizes: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if not name.endswith("/manifest")}


def test_bl19_bl49_a_server_killed_while_it_writes_there_finds_what_is_whole(storage, short_tmp):
    first, second = tokens(4), tokens(12, seed=1)
    flags = ("--server-id=a", "--chunk-size=4")
    with TcpProxy(storage.address) as proxy:
        with server_process(short_tmp, *flags, f"--l2={storage.url(proxy.address)}") as server:
            client = RawClient(server.channel()).register("inline")
            client.store("s", first)
            eventually(lambda: tier(client).objects == 4)
            proxy.stall_after(5 * OBJECT_BYTES)
            client.store("t", second)
            eventually(lambda: proxy.stalled)
            time.sleep(0.05)
            told = tier(client).objects
            server.kill()
        proxy.cut()
    sizes = eventually(lambda: whole(storage.sizes()))
    assert 4 <= told <= len(objects(sizes)) < 16
    storage.check()
    with server_process(short_tmp, *flags, f"--l2={storage.url(storage.address)}") as server:
        client = RawClient(server.channel()).register("inline")
        found = eventually(lambda: tier(client) if tier(client).objects else None)
        assert found.objects == len(objects(sizes))
        assert found.used_bytes == kept(sizes)
        assert client.lookup("s", first).l2_chunks == 4
        client.end_session("s")
        assert client.retrieve("s", first) == [content(key) for key in client.keys(first)]
        got = client.retrieve("t", second)
        keys = client.keys(second)
        there = [any(key.hex() in name for name in sizes) for key in keys]
        assert got == [content(key) for key in keys[: [*there, False].index(False)]]
        after = tier(client)
        assert (after.failed_reads, after.damaged_objects, after.problem) == (0, 0, "")
        # What was interrupted is written again, whole.
        client.store("u", second)
        eventually(lambda: tier(client).objects == 16)
    assert set(objects(storage.sizes()).values()) == {STORED}
    storage.check()


def whole(sizes: dict[str, int]) -> dict[str, int]:
    """Nothing shorter than an object is ever there."""
    assert set(objects(sizes).values()) <= {STORED}
    return sizes


def kept(sizes: dict[str, int]) -> int:
    """As the index counts: objects by their size, a manifest by what it occupies."""
    return sum(objects(sizes).values()) + 4096 * (len(sizes) - len(objects(sizes)))


def test_bl55_at_rest_nothing_can_be_read_and_another_key_makes_misses(storage, short_tmp):
    key = short_tmp / "key"
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)
    flags = (
        f"--l2={storage.url(storage.address)}",
        "--server-id=a",
        "--chunk-size=4",
        f"--l2-key-file={key}",
    )
    with server_process(short_tmp, *flags) as server:
        client = RawClient(server.channel()).register("inline")
        client.store("s", tokens(3), salt="alice")
        eventually(lambda: tier(client).objects == 3)
        keys = client.keys(tokens(3), "alice")
        server.terminate()
    stored = objects(storage.sizes())
    assert set(stored.values()) == {STORED + SEALED}
    for name in stored:
        value = storage.value(name)
        assert len(value) == STORED + SEALED
        assert not any(content(key)[:32] in value for key in keys)
    with server_process(short_tmp, *flags) as server:
        client = RawClient(server.channel()).register("inline")
        assert client.retrieve("s", tokens(3), salt="alice") == [content(key) for key in keys]
        assert client.hits(tokens(3)) == client.hits(tokens(3), salt="bob") == 0
        server.terminate()
    key.write_bytes(os.urandom(32))
    with server_process(short_tmp, *flags) as server:
        client = RawClient(server.channel()).register("inline")
        assert client.retrieve("s", tokens(3), salt="alice") == []
        assert "another key" in tier(client).problem
        server.terminate()
        assert server.output().count("another key") == 1, server.output()
        assert "alice" not in server.output()


def test_a_storage_that_is_away_costs_hits_only(storage, short_tmp):
    with TcpProxy(storage.address) as proxy:
        url = f"{storage.url(proxy.address)}&timeout=0.3s"
        with server_process(short_tmp, f"--l2={url}", "--server-id=a", "--chunk-size=4") as server:
            client = RawClient(server.channel()).register("inline")
            client.store("s", tokens(3))
            eventually(lambda: tier(client).objects == 3)
            client.admin.Clear(clear_memory(), timeout=10)
            proxy.cut()
            assert client.retrieve("s", tokens(3)) == []
            client.store("t", tokens(2, seed=1))
            assert client.retrieve("t", tokens(2, seed=1)) is not None
            assert tier(client).problem
            proxy.heal()
            eventually(
                lambda: client.retrieve("s", tokens(3)) == [content(k) for k in client.keys(tokens(3))]
            )
            eventually(lambda: not tier(client).problem)


def clear_memory():
    from kvwire.v1 import admin_service_pb2, event_pb2

    return admin_service_pb2.ClearRequest(tier=event_pb2.STORAGE_TIER_L1)


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("--l2=redis://127.0.0.1:1?size=1GiB&auth_env=NOT_SET", "NOT_SET"),
        ("--l2=redis://127.0.0.1:1?size=1GiB&colour=red", "colour"),
        ("--l2-key-file=/nowhere/key", "--l2-key-file"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(flag, problem):
    done = run_server("--listen=127.0.0.1:0", "--l2=memory://", flag)
    assert done.returncode != 0
    assert problem in done.stderr
    assert "Traceback" not in done.stderr
