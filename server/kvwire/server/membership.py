"""This server as a member of a fleet: at each coordinator for itself, and never at the cost of serving.

Being a member and having one's events arrive are two facts, and fail one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import grpc

from kvwire.client.status import from_rpc_error
from kvwire.errors import (
    DeadlineExceeded,
    IncarnationStale,
    KvwireError,
    ServerNotRegistered,
    Unavailable,
)
from kvwire.server.reporting.rpc import RpcReporter
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import coordinator_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from kvwire.client.channel import ChannelConfig
    from kvwire.server.intents import FleetIntents
    from kvwire.server.journal import Reader

log = logging.getLogger("kvwire.server")

CALL_S: Final = 3.0
LEAVE_S: Final = 1.0
RETRY_S: Final = 0.2
MAX_RETRY_S: Final = 5.0
MAX_INTERVAL_S: Final = 60.0
"""Between two life signs, whatever a coordinator says."""


@dataclass(slots=True)
class LinkState:
    """What is known of one coordinator. `answered_at` is monotonic; None: it never answered."""

    address: str
    registered: bool = False
    replaced: bool = False
    problem: str = ""
    sharing_problem: str = ""
    answered_at: float | None = None
    reporting: bool = False
    interval: float = field(default=5.0, repr=False)


class Membership:
    """At one coordinator. `describe` gives this server as it is now, `sign` its life sign.

    `reader` is None where events go another way.
    """

    def __init__(
        self,
        channel: ChannelConfig,
        describe: Callable[[], pb.ServerInfo],
        sign: Callable[[], pb.HeartbeatRequest],
        reader: Reader | None,
        intents: FleetIntents,
        watch: Callable[[str, Any], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """`watch` follows the members, by the address and a stub, for as long as this one is a member."""
        self.state = LinkState(str(channel.target))
        self.reader = reader
        self.stub: Any = None
        """While it is a member there."""
        self._config = channel
        self._describe = describe
        self._sign = sign
        self._intents = intents
        self._watch = watch
        self._changed = asyncio.Event()
        self._coordinator = b""

    def changed(self) -> None:
        """What `describe` tells has changed: the coordinator is told at once."""
        self._changed.set()

    async def run(self) -> None:
        """For ever, or until another process has taken this server's name."""
        retry = RETRY_S
        try:
            while not self.state.replaced:
                started = time.monotonic()
                long = await self._visit() and time.monotonic() - started > self.state.interval
                retry = RETRY_S if long else min(2 * retry, MAX_RETRY_S, max(RETRY_S, self.state.interval))
                await asyncio.sleep(retry * random.uniform(0.5, 1.0))  # noqa: S311  (spreads servers)
        finally:
            # Nothing is kept for one that sends nothing.
            if self.reader is not None:
                self.reader.leave()

    async def _visit(self) -> bool:
        """Over one connection, until it fails. Whether it was a member by then."""
        try:
            async with self._config.open_aio() as channel:
                stub: Any = coordinator_service_pb2_grpc.CoordinatorServiceStub(channel)
                try:
                    await self._register(stub)
                    await self._stay(stub)
                finally:
                    self.stub = None
        except (KvwireError, grpc.RpcError, TimeoutError) as error:
            joined = self.state.registered
            self._lost(error)
            return joined
        return False

    async def leave(self) -> None:
        """Say that this server stops. Best effort, within `LEAVE_S`."""
        if not self.state.registered:
            return
        info = self._describe()
        with contextlib.suppress(KvwireError, grpc.RpcError, TimeoutError):
            async with asyncio.timeout(LEAVE_S), self._config.open_aio() as channel:
                stub: Any = coordinator_service_pb2_grpc.CoordinatorServiceStub(channel)
                await stub.DeregisterServer(
                    pb.DeregisterServerRequest(server_id=info.server_id, incarnation=info.incarnation),
                    timeout=LEAVE_S,
                )
        self.state.registered = False

    async def _register(self, stub: Any) -> None:
        self._changed.clear()
        request = pb.RegisterServerRequest(server=self._describe())
        reply = await self._call("RegisterServer", stub.RegisterServer(request, timeout=CALL_S))
        state = self.state
        state.interval = min(max(0.05, reply.heartbeat_interval.ToMilliseconds() / 1000), MAX_INTERVAL_S)
        if state.sharing_problem != reply.sharing_problem and reply.sharing_problem:
            log.warning("%s: %s", state.address, reply.sharing_problem)
        state.sharing_problem = reply.sharing_problem
        if not state.registered:
            log.info("member of the fleet at %s", state.address)
        state.registered, state.problem = True, ""
        self.stub = stub
        if self.reader is not None and self._coordinator != reply.coordinator_incarnation:
            self.reader.seek(reply.next_sequence - 1 if reply.next_sequence else 0)
        self._coordinator = reply.coordinator_incarnation
        await self._intents.follow(stub, reply.intent_revision, reply.coordinator_incarnation)

    async def _stay(self, stub: Any) -> None:
        """Heartbeats and events side by side; the first failure ends both."""
        tasks = {asyncio.create_task(self._beat(stub), name="kvwire-heartbeat")}
        if self.reader is not None:
            tasks.add(asyncio.create_task(self._report(stub, self.reader), name="kvwire-report"))
        if self._watch is not None:
            watch = self._watch(self.state.address, stub)
            tasks.add(asyncio.create_task(watch, name="kvwire-watch-members"))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _beat(self, stub: Any) -> None:
        while True:
            reply = await self._call("Heartbeat", stub.Heartbeat(self._sign(), timeout=CALL_S))
            if reply.coordinator_incarnation != self._coordinator:
                raise ServerNotRegistered("The coordinator was restarted.", server_id="")
            await self._intents.follow(stub, reply.intent_revision, reply.coordinator_incarnation)
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it forgets a cancellation that comes together with the change.
                async with asyncio.timeout(self.state.interval):
                    await self._changed.wait()
                await self._register(stub)

    async def _report(self, stub: Any, reader: Reader) -> None:
        """Over and over: that events cannot be told is no reason to be no member."""
        retry = RETRY_S
        while True:
            # A stream that is open for a while is well, even if there is nothing to tell.
            settled = asyncio.get_running_loop().call_later(RETRY_S, self._arrives)
            try:
                await RpcReporter(reader, self._arrives).run(stub)
                problem = "the coordinator ended the stream of events"
            except grpc.aio.AioRpcError as error:
                told = self._typed("ReportEvents", error)
                if isinstance(told, ServerNotRegistered | IncarnationStale):
                    raise told from error
                problem = f"events: {told}"
            except TimeoutError as error:
                problem = f"events: {error}"
            finally:
                settled.cancel()
                arrived, self.state.reporting = self.state.reporting, False
            if problem != self.state.problem:
                log.warning("%s: %s", self.state.address, problem)
            self.state.problem = problem
            retry = RETRY_S if arrived else min(2 * retry, MAX_RETRY_S)
            await asyncio.sleep(retry)

    def _arrives(self) -> None:
        self.state.reporting, self.state.problem = True, ""

    async def _call(self, method: str, call: Any) -> Any:
        try:
            reply = await call
        except grpc.aio.AioRpcError as error:
            raise self._typed(method, error) from error
        self.state.answered_at = time.monotonic()
        return reply

    def _typed(self, method: str, error: grpc.aio.AioRpcError) -> KvwireError:
        address = self.state.address
        typed = from_rpc_error(error, address=address, method=method, seconds=CALL_S)
        if isinstance(typed, Unavailable):
            return Unavailable(f"no coordinator answers there: {error.details()}", address=address)
        if isinstance(typed, DeadlineExceeded):
            return DeadlineExceeded(f"the coordinator does not answer {method} within {CALL_S:.0f} s")
        return typed

    def _lost(self, error: Exception) -> None:
        state = self.state
        text = str(error)
        state.registered = False
        if isinstance(error, IncarnationStale):
            state.replaced = True
            text = (
                f"another process is a member with this server's name: {text} This one goes on serving, and "
                "is no member any more. Give each server a --server-id of its own."
            )
        if text != state.problem:
            log.warning("%s: %s", state.address, text)
        state.problem = text
