from __future__ import annotations

import asyncio
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvwire.errors import ConfigError
from kvwire.v1 import cache_service_pb2 as pb
from support.local_server import local_server
from support.raw_client import CALL_S, Failure, RawClient, content, failure, tokens
from support.server_process import server_process
from support.waiting import eventually

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = ("", "kvwire.v1.CacheService", "kvwire.v1.AdminService", "kvwire.v1.PeerService")
MIB = 1 << 20


class Load:
    """Clients that look up and store until the server goes away."""

    def __init__(self, server, clients=4):
        self.failures = []
        self.calls = 0
        self._pool = ThreadPoolExecutor(clients)
        self._done = [self._pool.submit(self._run, RawClient(server.channel()), n) for n in range(clients)]

    def _run(self, client, number):
        try:
            client.register("inline", attach=True)
            for turn in range(100_000):
                client.store(f"s{number}", tokens(3, seed=number * 100_000 + turn))
                self.calls += 1
        except grpc.RpcError as error:
            self.failures.append(Failure.of(error))
        finally:
            client.close()

    def join(self):
        self._pool.shutdown(wait=True)
        for each in self._done:
            each.result()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_under_load_and_with_open_streams_it_stops_in_time(short_tmp, number):
    with server_process(short_tmp, "--chunk-size=4", "--l1-size=32MiB") as server:
        client = RawClient(server.channel()).register("shm", attach=True, object_bytes=8 * MIB)
        client.namespace.model = "test/large"
        client.register("inline", attach=True, object_bytes=8 * MIB)
        events = client.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
        assert next(events).sequence == 0
        assert client.store("whole", tokens(2)) == 2
        client.lookup("whole", tokens(2))
        ticket = client.begin_retrieve("whole", 0, 2).ticket
        reading = client.stub.ReadChunks(
            pb.ReadChunksRequest(registration_id=client.registration_id, lease_ids=[ticket.lease_id])
        )
        assert next(reading).data
        load = Load(server)
        eventually(lambda: load.calls > 20)
        server.terminate(number)
        load.join()
        assert {each.code for each in load.failures} <= {
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.CANCELLED,
        }
        # The piece that nobody took away holds the stream open until the server gives up on it.
        assert failure(list, reading).code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
        assert failure(list, events).reason == "DRAINING"
        assert client.attachment.ended.wait(CALL_S)
        assert client.attachment.events == ["attached", "draining"]
        client.let_go()


def test_an_idle_server_tells_attached_clients_that_it_stops(server, client):
    attached = client.register("inline", attach=True).attachment
    server.terminate()
    assert attached.ended.wait(CALL_S)
    assert attached.events == ["attached", "draining"]
    assert attached.failure is None


def hold(local, path="inline"):
    """Make commits on a path wait until the returned event is set (on the server's loop)."""
    released = local.run(asyncio.Event)
    entered = threading.Event()
    real = local.core.plane.path(path).received

    async def received(*args):
        entered.set()
        await released.wait()
        return await real(*args)

    local.core.plane.path(path).received = received
    return entered, lambda: local.run(released.set)


def test_calls_in_flight_end_while_new_ones_are_refused(local, local_client):
    client = local_client.register("inline", attach=True)
    packed = tokens(2)
    client.lookup("s", packed)
    ticket = client.begin_store("s", 0, 2).ticket
    client.write(ticket, [content(key) for key in client.keys(packed)])
    entered, release = hold(local)
    health = health_pb2_grpc.HealthStub(client.channel)
    with ThreadPoolExecutor(1) as pool:
        commit = pool.submit(client.commit, ticket.lease_id)
        assert entered.wait(CALL_S)
        local.begin_stop()
        assert client.attachment.draining.wait(CALL_S)
        for call in (
            lambda: client.lookup("new", packed),
            lambda: client.begin_store("s", 0, 1),
            client.negotiate,
        ):
            refused = failure(call)
            assert refused.code == grpc.StatusCode.UNAVAILABLE
            assert refused.reason == "DRAINING"
        assert client.ping().draining
        assert client.status().draining
        for name in SERVICES:
            reply = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=CALL_S)
            assert reply.status == NOT_SERVING
        assert not commit.done()
        release()
        assert commit.result(CALL_S).committed == 2
    assert client.attachment.ended.wait(CALL_S)


def test_a_call_that_does_not_end_is_given_up(local, local_client):
    client = local_client.register("inline")
    client.lookup("s", tokens(1))
    ticket = client.begin_store("s", 0, 1).ticket
    entered, _never = hold(local)
    with ThreadPoolExecutor(1) as pool:
        commit = pool.submit(failure, client.commit, ticket.lease_id)
        assert entered.wait(CALL_S)
        local.begin_stop()
        assert commit.result(CALL_S).code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


def test_a_dead_background_task_turns_health_off_and_is_shown(local, local_client):
    health = health_pb2_grpc.HealthStub(local_client.channel)
    watched = health.Watch(health_pb2.HealthCheckRequest(), timeout=CALL_S)
    assert next(watched).status == health_pb2.HealthCheckResponse.SERVING

    def broken(*_):
        raise RuntimeError("a test says so")

    local.engine.expire = broken
    assert next(watched).status == NOT_SERVING
    watched.cancel()
    for name in SERVICES:
        reply = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=CALL_S)
        assert reply.status == NOT_SERVING
    (dead,) = [task for task in local_client.status().tasks if not task.running]
    assert dead.name == "sweep"
    assert dead.error == "RuntimeError: a test says so"
    assert "sweep" in local.run(local.server._problem)


@pytest.mark.leakcheck("shm")
def test_a_server_that_cannot_start_leaves_nothing(short_tmp):

    with (
        local_server(short_tmp) as local,
        pytest.raises(ConfigError, match="another server"),
        local_server(short_tmp, listen=(f"unix:{short_tmp}/other.sock", local.address)),
    ):
        pass
    assert not (short_tmp / "other.sock").exists()
