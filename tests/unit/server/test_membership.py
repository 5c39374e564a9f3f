"""A server at coordinators that end streams, forget, hang and lie. They are played, gRPC is real."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest

from kvwire.client.channel import ChannelConfig, parse_target
from kvwire.client.status import rpc_status
from kvwire.errors import IncarnationStale, Overloaded, ServerNotRegistered
from kvwire.server import membership as module
from kvwire.server.journal import Entry, EventKind, Journal, JournalLimits
from kvwire.server.membership import Membership
from kvwire.server.reporting import rpc
from kvwire.server.reporting.batches import BatchEncoder
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import coordinator_service_pb2_grpc as pb_grpc

INTERVAL_S = 0.05


class Coordinator(pb_grpc.CoordinatorServiceServicer):
    """`took` has the sequences of batches that it acknowledged. `refuse` is raised by life signs."""

    def __init__(self) -> None:
        self.run = b"1" * 16
        self.next_sequence = 1
        self.took: list[int] = []
        self.registered: list[pb.ServerInfo] = []
        self.left = 0
        self.beats = 0
        self.streams = 0
        self.refuse: Exception | None = None
        self.stream_refuse: Exception | None = None
        self.end_after = 0
        self.mute = False
        self.hang: set[str] = set()
        self.interval_s = INTERVAL_S

    async def _maybe_hang(self, method: str) -> None:
        if method in self.hang:
            await asyncio.Event().wait()

    async def _refused(self, error: Exception | None, context) -> None:
        if error is not None:
            await context.abort_with_status(rpc_status(error))

    async def RegisterServer(self, request, context):
        await self._maybe_hang("register")
        self.registered.append(request.server)
        reply = pb.RegisterServerResponse(
            coordinator_incarnation=self.run, next_sequence=self.next_sequence, sharing=True
        )
        reply.heartbeat_interval.FromMilliseconds(int(self.interval_s * 1000))
        return reply

    async def Heartbeat(self, request, context):
        await self._maybe_hang("beat")
        self.beats += 1
        await self._refused(self.refuse, context)
        return pb.HeartbeatResponse(coordinator_incarnation=self.run)

    async def DeregisterServer(self, request, context):
        await self._maybe_hang("leave")
        self.left += 1
        return pb.DeregisterServerResponse()

    async def ReportEvents(self, request_iterator, context):
        self.streams += 1
        await self._refused(self.stream_refuse, context)
        count = 0
        async for request in request_iterator:
            if self.mute:
                continue
            self.took.append(request.batch.sequence)
            yield pb.ReportEventsResponse(sequence=request.batch.sequence)
            count += 1
            if count == self.end_after:
                return


class Bench:
    def __init__(self, played: Coordinator, journal: Journal, member: Membership, task, server) -> None:
        self.played, self.journal, self.member, self.task, self.server = played, journal, member, task, server

    def tell(self, batches: int) -> None:
        for index in range(batches):
            self.journal.note(Entry(EventKind.STORE, 1, "memory", bytes([index]) * 32, 10))
            self.journal.close()

    async def until(self, condition) -> None:
        async with asyncio.timeout(15):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


class NoIntents:
    async def follow(self, *_):
        return True


@contextlib.asynccontextmanager
async def bench(folder, played: Coordinator, **limits):
    address = f"unix:{folder}/c.sock"
    server = grpc.aio.server()
    pb_grpc.add_CoordinatorServiceServicer_to_server(played, server)
    server.add_insecure_port(address)
    await server.start()
    journal = Journal(BatchEncoder("a", bytes(16)), lambda: None, JournalLimits(**limits))
    size = [0]
    member = Membership(
        ChannelConfig(parse_target(address)),
        lambda: pb.ServerInfo(server_id="a", incarnation=bytes(16), chunk_size=size[0]),
        lambda: pb.HeartbeatRequest(server_id="a", last_sequence=journal.closed_sequence),
        journal.reader(),
        NoIntents(),  # type: ignore[arg-type]
    )
    task = asyncio.ensure_future(member.run())
    made = Bench(played, journal, member, task, server)
    made.size = size
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop(0)


@pytest.fixture
def with_bench(short_tmp):
    """Runs a test's coroutine function with a bench."""

    def run(body, **limits):
        async def whole() -> None:
            async with bench(short_tmp, Coordinator(), **limits) as made:
                await body(made)

        asyncio.run(asyncio.wait_for(whole(), 30))

    return run


def test_events_arrive_in_order_and_are_let_go(with_bench):
    async def body(made: Bench) -> None:
        made.tell(3)
        await made.until(lambda: made.played.took == [1, 2, 3])
        made.tell(200)
        await made.until(lambda: len(made.played.took) == 203)
        assert made.played.took == list(range(1, 204))
        await made.until(lambda: made.journal.held_batches == 0)
        assert made.member.state.registered
        assert made.member.state.reporting

    with_bench(body)


@pytest.mark.parametrize("quiet", [True, False], ids=["ended", "refused"])
def test_a_stream_that_ends_loses_no_batch_and_no_membership(with_bench, quiet):
    """Whatever an ended stream had still taken from the journal must be told by the next one."""

    async def body(made: Bench) -> None:
        played = made.played
        await made.until(lambda: played.streams == 1)
        played.end_after = 2
        if not quiet:
            played.stream_refuse = Overloaded("a test", in_flight=1, allowed=1)
        made.tell(2)
        await made.until(lambda: played.took == [1, 2])
        await made.until(lambda: not made.member.state.reporting)
        played.end_after, played.stream_refuse = 0, None
        # The next stream is open before there is news, which the one before must not take.
        await made.until(lambda: made.member.state.reporting)
        made.tell(3)
        await made.until(lambda: played.took == [1, 2, 3, 4, 5])
        await made.until(lambda: made.journal.held_batches == 0)
        await made.until(lambda: not made.member.state.problem)
        assert len(played.registered) == 1

    with_bench(body)


def test_batches_without_an_answer_are_sent_again(with_bench, monkeypatch):
    monkeypatch.setattr(rpc, "SILENCE_S", 0.2)

    async def body(made: Bench) -> None:
        made.played.mute = True
        made.tell(rpc.WINDOW + 10)
        await made.until(lambda: "acknowledged" in made.member.state.problem)
        assert made.member.state.registered
        made.played.mute = False
        await made.until(lambda: made.played.took == list(range(1, rpc.WINDOW + 11)))

    with_bench(body)


def test_another_run_of_the_coordinator_is_registered_with_and_told_what_is_left(with_bench):
    async def body(made: Bench) -> None:
        made.tell(2)
        await made.until(lambda: made.played.took == [1, 2])
        made.played.run = b"2" * 16
        await made.until(lambda: len(made.played.registered) == 2)
        made.tell(1)
        await made.until(lambda: made.played.took == [1, 2, 3])
        assert made.member.state.registered

    with_bench(body)


def test_one_that_has_forgotten_the_server_is_registered_with_again(with_bench):
    async def body(made: Bench) -> None:
        await made.until(lambda: made.played.beats > 0)
        made.played.refuse = ServerNotRegistered("who?", server_id="a")
        await made.until(lambda: len(made.played.registered) >= 2)
        made.played.refuse = None
        before = made.played.beats
        await made.until(lambda: made.played.beats > before + 2)
        assert made.member.state.registered
        assert not made.member.state.problem

    with_bench(body)


def test_a_name_that_was_taken_ends_the_membership_and_keeps_nothing(with_bench):
    async def body(made: Bench) -> None:
        await made.until(lambda: made.played.beats > 0)
        made.played.refuse = IncarnationStale("newer run", server_id="a")
        await asyncio.wait_for(made.task, 10)
        state = made.member.state
        assert (state.registered, state.replaced) == (False, True)
        assert "--server-id" in state.problem
        made.tell(3)
        assert made.journal.held_batches == 0
        await made.member.leave()
        assert not made.played.left

    with_bench(body)


def test_what_changes_is_told_at_once(with_bench):
    async def body(made: Bench) -> None:
        made.played.interval_s = 60.0
        made.played.run = b"3" * 16
        await made.until(lambda: made.played.registered and made.played.registered[-1].chunk_size == 0)
        await made.until(lambda: made.member.state.interval == 60.0)
        before = made.played.beats
        await made.until(lambda: made.played.beats > 0)
        made.size[0] = 16
        made.member.changed()
        await made.until(lambda: made.played.registered[-1].chunk_size == 16)
        assert before <= made.played.beats

    with_bench(body)


@pytest.mark.parametrize("method", ["register", "beat"])
def test_one_that_hangs_is_given_up_and_comes_back(with_bench, monkeypatch, method):
    monkeypatch.setattr(module, "CALL_S", 0.3)

    async def body(made: Bench) -> None:
        made.played.hang = {method}
        await made.until(lambda: "does not answer" in made.member.state.problem)
        assert not made.member.state.registered
        assert made.member.stub is None
        made.played.hang = set()
        made.tell(1)
        await made.until(lambda: made.member.state.registered and made.played.took == [1])

    with_bench(body)


def test_leaving_one_that_hangs_takes_a_bounded_time(with_bench, monkeypatch):
    monkeypatch.setattr(module, "LEAVE_S", 0.2)

    async def body(made: Bench) -> None:
        await made.until(lambda: made.member.state.registered)
        made.played.hang = {"leave"}
        await asyncio.wait_for(made.member.leave(), 10)
        made.played.hang = set()
        made.member.state.registered = True
        await made.member.leave()
        assert made.played.left == 1

    with_bench(body)


def test_one_that_is_not_there_costs_nothing(with_bench):
    async def body(made: Bench) -> None:
        await made.until(lambda: made.member.state.registered)
        await made.server.stop(0)
        await made.until(lambda: not made.member.state.registered)
        await made.until(lambda: "no coordinator answers" in made.member.state.problem)
        made.tell(5)
        assert made.journal.held_batches == 5
        await asyncio.wait_for(made.member.leave(), 5)

    with_bench(body)


def test_a_life_sign_interval_that_makes_no_sense_is_bounded(with_bench):
    async def body(made: Bench) -> None:
        await made.until(lambda: made.member.state.registered)
        for told, used in ((-5.0, 0.05), (1e9, module.MAX_INTERVAL_S)):
            made.played.interval_s = told
            made.played.run = bytes([int(used)]) * 16
            await made.until(lambda used=used: made.member.state.interval == used)

    with_bench(body)


@pytest.mark.parametrize("turns", range(6))
def test_a_stop_that_comes_together_with_a_change_ends_it(with_bench, turns):
    """It did not, at one of these moments: the stop of the server waited for ever."""

    async def body(made: Bench) -> None:
        await made.until(lambda: made.played.beats)
        made.played.interval_s = 60.0
        made.member.changed()
        await made.until(lambda: made.member.state.interval == 60.0)
        await asyncio.sleep(0.1)
        made.member.changed()
        for _ in range(turns):
            await asyncio.sleep(0)
        made.task.cancel()
        await asyncio.wait({made.task}, timeout=10)
        assert made.task.done()

    with_bench(body)
