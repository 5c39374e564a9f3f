"""Real servers and real coordinators. Whatever a coordinator does, a server serves."""

from __future__ import annotations

import base64
import contextlib
import signal
import time

import grpc
import pytest

from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import admin_service_pb2_grpc, cache_service_pb2, namespace_pb2
from kvwire.v1 import cache_service_pb2_grpc as cache_grpc
from kvwire.v1 import coordinator_service_pb2 as pb
from support.coordinator_process import FAST, coordinator_process
from support.raw_client import MODEL, Failure, RawClient, tokens
from support.server_process import server_process
from support.tools import Grpcurl
from support.waiting import eventually

LOCATE = "kvwire.v1.CoordinatorService/LocateChunks"
NAMESPACE = namespace_pb2.Namespace(model=MODEL)
CURRENT = pb.REPORTING_STATE_CURRENT


@pytest.fixture
def coordinator(short_tmp):
    with coordinator_process(short_tmp, *FAST) as started:
        yield started


@contextlib.contextmanager
def cache_server(folder, name, coordinators, *flags, file="", chunk_size=4, stop=True):
    joins = [f"--coordinator={each.address}" for each in coordinators]
    settings = [f"--chunk-size={chunk_size}", "--sweep-interval=0.1", f"--server-id={name}", *joins, *flags]
    listen = f"unix:{folder / (file or name)}.sock"
    with server_process(folder, *settings, listen=listen, stop=stop) as server:
        yield server


@contextlib.contextmanager
def registered(server, path="shm"):
    client = RawClient(server.channel()).register(path)
    try:
        yield client
    finally:
        client.let_go()


def store(server, seed: int, chunks: int = 2) -> None:
    with registered(server) as client:
        client.store(f"s{seed}", tokens(chunks, seed))


def holders(coordinator, seed: int, chunks: int = 2) -> dict[str, int]:
    """{server: chunks of the prompt}. Nothing while no member has a chunk size."""
    request = pb.LocateChunksRequest(namespace=NAMESPACE, tokens=tokens(chunks, seed))
    try:
        reply = coordinator.stub().LocateChunks(request, timeout=10)
    except grpc.RpcError as error:
        if Failure.of(error).reason == "CHUNK_SIZE_NOT_NEGOTIATED":
            return {}
        raise
    return {each.server_id: each.prefix_chunks for each in reply.servers}


def member(coordinator, name) -> pb.Member | None:
    members = coordinator.stub().ListServers(pb.ListServersRequest(), timeout=10).members
    return next((each for each in members if each.server.server_id == name), None)


def link(server) -> admin.CoordinatorLink:
    return status(server).coordinators[0]


def status(server) -> admin.GetStatusResponse:
    return admin_service_pb2_grpc.AdminServiceStub(server.channel()).GetStatus(
        admin.GetStatusRequest(), timeout=10
    )


def test_what_servers_store_is_located_until_they_are_killed(coordinator, short_tmp):
    with (
        cache_server(short_tmp, "a", [coordinator], stop=False) as a,
        cache_server(short_tmp, "b", [coordinator]) as b,
    ):
        store(a, 1, 2)
        store(b, 1, 3)
        eventually(lambda: holders(coordinator, 1, 3) == {"a": 2, "b": 3})
        asked = {"model": MODEL}, base64.b64encode(tokens(3, 1)).decode()
        told = Grpcurl(coordinator.address).call(LOCATE, namespace=asked[0], tokens=asked[1])
        assert told["combined_prefix_chunks"] == 3, told
        assert [each["server_id"] for each in told["servers"]] == ["b", "a"]
        shown = status(a)
        assert shown.coordinators[0].registered
        eventually(lambda: link(a).reporting)
        eventually(lambda: status(a).events.held_batches == 0)
        a.kill()
        eventually(lambda: member(coordinator, "a") is None)
        assert holders(coordinator, 1, 3) == {"b": 3}
        # Another run under the same name starts with nothing.
        with cache_server(short_tmp, "a", [coordinator], file="again") as again:
            eventually(lambda: member(coordinator, "a") is not None)
            assert holders(coordinator, 1, 3) == {"b": 3}
            store(again, 1, 2)
            eventually(lambda: holders(coordinator, 1, 3) == {"a": 2, "b": 3})


def test_a_killed_coordinator_is_whole_again_without_new_stores(short_tmp):
    with (
        coordinator_process(short_tmp, *FAST, stop=False) as first,
        cache_server(short_tmp, "a", [first]) as a,
    ):
        store(a, 1)
        eventually(lambda: holders(first, 1) == {"a": 2})
        first.kill()
        store(a, 2)
        with registered(a) as client:
            assert client.hits(tokens(2, 1)) == client.hits(tokens(2, 2)) == 2
        eventually(lambda: not link(a).registered)
        assert link(a).problem
        assert not status(a).draining
        with coordinator_process(short_tmp, *FAST) as second:
            eventually(lambda: holders(second, 1) == holders(second, 2) == {"a": 2})
            eventually(lambda: link(a).registered and not link(a).problem)
            store(a, 3)
            eventually(lambda: holders(second, 3) == {"a": 2})


def test_a_coordinator_that_hangs_costs_a_server_nothing(short_tmp):
    with (
        coordinator_process(short_tmp, *FAST) as coordinator,
        cache_server(short_tmp, "a", [coordinator], "--enable-blend-lookup", stop=False) as a,
    ):
        eventually(lambda: link(a).registered)
        coordinator.process.send_signal(signal.SIGSTOP)
        try:
            store(a, 1)
            with registered(a) as client:
                assert client.hits(tokens(2, 1)) == 2
            # BL-43 b: what is here is found, whatever becomes of the fleet.
            asked = cache_service_pb2.CacheServiceMatchBlendRequest(
                namespace=NAMESPACE, tokens=tokens(1, 9) + tokens(2, 1)
            )
            asked.fleet_deadline.FromMilliseconds(50)
            reply = cache_grpc.CacheServiceStub(a.channel()).MatchBlend(asked, timeout=10)
            assert [(each.cached_position, each.prompt_position) for each in reply.matches] == [
                (0, 4),
                (4, 8),
            ]
            assert reply.fleet == cache_service_pb2.FLEET_ANSWER_NONE
        finally:
            coordinator.process.send_signal(signal.SIGCONT)
        eventually(lambda: holders(coordinator, 1) == {"a": 2})
        coordinator.process.send_signal(signal.SIGSTOP)
        try:
            a.terminate()
        finally:
            coordinator.process.send_signal(signal.SIGCONT)


def test_evicted_and_cleared_chunks_are_not_located_and_a_stopped_server_leaves(coordinator, short_tmp):
    with cache_server(short_tmp, "a", [coordinator], "--l1-size=1MiB") as a:
        store(a, 1)
        eventually(lambda: holders(coordinator, 1) == {"a": 2})
        store(a, 2, 15)
        eventually(lambda: holders(coordinator, 1) == {})
        admin_service_pb2_grpc.AdminServiceStub(a.channel()).Clear(admin.ClearRequest(), timeout=10)
        eventually(lambda: holders(coordinator, 2) == {})
        store(a, 3)
        eventually(lambda: holders(coordinator, 3) == {"a": 2})
        assert a.terminate() < 5
        assert member(coordinator, "a") is None
        time.sleep(0.5)
        assert member(coordinator, "a") is None


def test_of_two_servers_with_one_name_the_older_serves_on_and_says_so(coordinator, short_tmp):
    with cache_server(short_tmp, "a", [coordinator], file="old") as old:
        store(old, 1)
        eventually(lambda: holders(coordinator, 1) == {"a": 2})
        with cache_server(short_tmp, "a", [coordinator], file="new") as new:
            eventually(lambda: "--server-id" in link(old).problem)
            assert not link(old).registered
            store(new, 2)
            eventually(lambda: holders(coordinator, 2) == {"a": 2})
            assert holders(coordinator, 1) == {}
            store(old, 3)
            with registered(old) as client:
                assert client.hits(tokens(2, 1)) == client.hits(tokens(2, 3)) == 2
            assert status(old).events.held_batches == 0
            old.terminate()
            assert member(coordinator, "a").server.addresses == [new.address]


def test_another_chunk_size_is_shown_and_stays_apart(coordinator, short_tmp):
    with (
        cache_server(short_tmp, "a", [coordinator]) as a,
        cache_server(short_tmp, "b", [coordinator], chunk_size=8) as b,
    ):
        store(a, 1)
        eventually(lambda: holders(coordinator, 1) == {"a": 2})
        with registered(b) as client:
            assert client.chunk_size == 8
        eventually(lambda: "chunk" in link(b).sharing_problem)
        assert member(coordinator, "b").sharing_problem
        assert link(b).registered
        assert not link(a).sharing_problem


def test_pins_of_a_coordinator_reach_its_servers(short_tmp):
    state = f"--state={short_tmp / 'state'}"
    with (
        coordinator_process(short_tmp, *FAST, state) as coordinator,
        cache_server(short_tmp, "a", [coordinator]) as a,
    ):
        with registered(a) as client:
            client.store("s", tokens(2, 1))
            keys = client.keys(tokens(2, 1))
        of_fleet = admin_service_pb2_grpc.AdminServiceStub(coordinator.channel())
        chosen = admin.PromptSelector(chunk_keys={"keys": keys})
        assert of_fleet.Pin(admin.PinRequest(selector=chosen), timeout=10).pinned_chunks == 2
        of_server = admin_service_pb2_grpc.AdminServiceStub(a.channel())

        def kept() -> int:
            return of_server.Clear(admin.ClearRequest(), timeout=10).kept_chunks

        with registered(a) as client:

            def stays() -> bool:
                client.store("s", tokens(2, 1))
                return kept() == 2

            eventually(stays)
        assert of_fleet.Unpin(admin.UnpinRequest(selector=chosen), timeout=10).unpinned_chunks == 2
        eventually(lambda: kept() == 0)


def test_each_coordinator_is_told_and_one_that_is_away_does_not_matter(coordinator, short_tmp):
    other = short_tmp / "other"
    other.mkdir()
    with (
        coordinator_process(other, *FAST, stop=False) as second,
        cache_server(short_tmp, "a", [coordinator, second]) as a,
    ):
        store(a, 1)
        eventually(lambda: holders(coordinator, 1) == holders(second, 1) == {"a": 2})
        second.kill()
        store(a, 2)
        eventually(lambda: holders(coordinator, 2) == {"a": 2})
        told = {each.address: each.registered for each in status(a).coordinators}
        assert told[coordinator.address]
        assert member(coordinator, "a").reporting == CURRENT
        assert status(a).events.held_batches >= 1
