"""Pins at a cache server, through its own process or beside it."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from kvwire.errors import OutOfSpace, StateUnavailable
from kvwire.server.engine import make_store
from kvwire.server.intents import FleetIntents
from kvwire.server.pinning import Pinning
from kvwire.server.quotas import Quotas
from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import admin_service_pb2_grpc
from kvwire.v1 import coordinator_service_pb2 as coordinator
from support.local_server import local_server
from support.raw_client import RawClient, failure, tokens
from support.server_process import server_process

KEYS = [index.to_bytes(32, "big") for index in range(1, 100)]


def selector(client, packed: bytes, by: str) -> admin.PromptSelector:
    if by == "keys":
        return admin.PromptSelector(chunk_keys={"keys": client.keys(packed)})
    return admin.PromptSelector(namespace=client.namespace, tokens=packed)


@pytest.mark.parametrize("by", ["tokens", "keys"])
def test_a_pinned_prompt_is_not_cleared_until_it_is_unpinned(tmp_path, by):
    with local_server(tmp_path, state=str(tmp_path / "state")) as server:
        client = RawClient(server.channel())
        client.register()
        stub = admin_service_pb2_grpc.AdminServiceStub(server.channel())
        chosen = selector(client, tokens(3), by)
        # Before it is stored.
        assert stub.Pin(admin.PinRequest(selector=chosen)).pinned_chunks == 3
        client.store("a", tokens(3))
        client.store("b", tokens(3, seed=1))
        client.end_session("a", "b")
        reply = stub.Clear(admin.ClearRequest())
        assert (reply.cleared_chunks, reply.kept_chunks) == (3, 3)
        assert client.hits(tokens(3)) == 3
        assert stub.Unpin(admin.UnpinRequest(selector=chosen)).unpinned_chunks == 3
        assert stub.Unpin(admin.UnpinRequest(selector=chosen)).unpinned_chunks == 0
        assert stub.Clear(admin.ClearRequest()).cleared_chunks == 3


def test_what_cannot_be_pinned_is_refused_with_a_reason(tmp_path):
    with local_server(tmp_path) as server:
        stub = admin_service_pb2_grpc.AdminServiceStub(server.channel())
        by_key = admin.PinRequest(selector={"chunk_keys": {"keys": [KEYS[0]]}})
        assert failure(stub.Pin, by_key).reason == "STATE_UNAVAILABLE"
        assert failure(stub.Pin, admin.PinRequest()).reason == "INVALID_FIELD"
        bad = admin.PinRequest(selector={"chunk_keys": {"keys": [b"short"]}})
        assert failure(stub.Pin, bad).reason == "INVALID_FIELD"
        by_tokens = admin.PinRequest(selector={"namespace": {"model": "m"}, "tokens": tokens(1)})
        assert failure(stub.Pin, by_tokens).reason == "CHUNK_SIZE_NOT_NEGOTIATED"
        RawClient(server.channel()).negotiate()
        by_tokens.selector.tokens = b"abc"
        assert failure(stub.Pin, by_tokens).reason == "TOKENS_INVALID"


def test_pins_outlive_a_killed_server(tmp_path):
    flags = (f"--state={tmp_path / 'state'}",)
    request = admin.PinRequest(selector={"chunk_keys": {"keys": KEYS[:5]}})
    with server_process(tmp_path, *flags, stop=False) as server:
        stub = admin_service_pb2_grpc.AdminServiceStub(server.channel())
        assert stub.Pin(request).pinned_chunks == 5
        server.process.kill()
        server.process.wait(10)
    with server_process(tmp_path, *flags) as server:
        stub = admin_service_pb2_grpc.AdminServiceStub(server.channel())
        unpin = admin.UnpinRequest(selector=request.selector)
        assert stub.Unpin(unpin).unpinned_chunks == 5


class FakeCoordinator:
    """What FleetIntents calls."""

    def __init__(self) -> None:
        self.reply = coordinator.GetIntentsResponse()
        self.asked = 0
        self.away = False

    async def GetIntents(self, request, timeout):  # noqa: ASYNC109
        self.asked += 1
        if self.away:
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
        return self.reply

    def wants(self, revision: int, *keys: bytes) -> None:
        self.reply = coordinator.GetIntentsResponse(revision=revision, pinned_keys=keys)


@pytest.mark.asyncio
async def test_a_key_is_pinned_while_anybody_wants_it(tmp_path):
    store = make_store(1 << 20)
    pinning = Pinning(store, str(tmp_path))
    first, second = FakeCoordinator(), FakeCoordinator()
    quotas = Quotas(store, None)
    one, two = (FleetIntents(name, pinning, quotas) for name in ("one", "two"))
    pinned = store.key_pins.keys

    assert await one.follow(first, 0)
    assert first.asked == 0
    first.wants(1, KEYS[0], KEYS[1])
    second.wants(7, KEYS[1], KEYS[2])
    await pinning.pin([KEYS[2], KEYS[3]])
    assert await one.follow(first, 1)
    assert await one.follow(first, 1)
    assert await two.follow(second, 7)
    assert (first.asked, second.asked) == (1, 1)
    assert pinned == set(KEYS[:4])

    # A coordinator that is away takes none away, and is asked again when it is back.
    first.away = True
    assert not await one.follow(first, 2)
    assert pinned == set(KEYS[:4])
    first.away = False
    first.wants(2, KEYS[0])
    assert await one.follow(first, 2)
    assert pinned == set(KEYS[:4])
    second.wants(8)
    assert await two.follow(second, 8)
    assert pinned == {KEYS[0], KEYS[2], KEYS[3]}
    # The same number from another run is looked at, too.
    first.wants(2, KEYS[9], b"no key")
    assert await one.follow(first, 2, b"another run")
    assert pinned == {KEYS[9], KEYS[2], KEYS[3]}
    await pinning.unpin([KEYS[2], KEYS[9]])
    assert pinned == {KEYS[9], KEYS[3]}
    await pinning.close()


@pytest.mark.asyncio
async def test_pins_that_overtake_each_other_end_as_the_file_says(tmp_path):
    store = make_store(1 << 20)
    pinning = Pinning(store, str(tmp_path / "state"))
    for _ in range(20):
        await asyncio.gather(
            *(pinning.pin([key]) for key in KEYS[:10]), *(pinning.unpin([key]) for key in KEYS[5:15])
        )
        assert store.key_pins.keys == set(pinning._own.intents.pins)
    await pinning.close()
    again = make_store(1 << 20)
    reopened = Pinning(again, str(tmp_path / "state"))
    assert again.key_pins.keys == store.key_pins.keys
    await reopened.close()


@pytest.mark.asyncio
async def test_a_pin_that_cannot_be_kept_is_not_there(tmp_path, monkeypatch):
    store = make_store(1 << 20)
    pinning = Pinning(store, str(tmp_path))
    monkeypatch.setattr(pinning._own, "_persist", _full)
    with pytest.raises(StateUnavailable):
        await pinning.pin([KEYS[0]])
    assert not store.key_pins.keys
    monkeypatch.setattr(type(store.key_pins), "with_all", lambda *_: store.key_pins.limit + 1)
    with pytest.raises(OutOfSpace):
        await pinning.pin([KEYS[0]])
    assert not store.key_pins.keys
    await pinning.close()


def _full(*_args):
    raise OSError(28, "No space left on device")
