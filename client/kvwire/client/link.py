"""A client's standing at one server: negotiated, registered, attached, watched, recovered after an outage."""

from __future__ import annotations

import logging
import threading
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

from kvwire.client import forks
from kvwire.client.agreement import ChunkSizeAgreement
from kvwire.client.health import HEARTBEAT_S, HealthLoop, loops
from kvwire.errors import (
    DeadlineExceeded,
    Draining,
    KvwireError,
    NotRegistered,
    TransferTimeout,
    Unavailable,
)

if TYPE_CHECKING:
    from kvwire.client.client import Client
    from kvwire.client.streams import AttachStream
    from kvwire.client.types import Pong

logger = logging.getLogger(__name__)

_PINGS: Final = 2
_FAREWELL_S: Final = 1.0
_FIRST_RETRY_S: Final = 0.25
_TOLD: Final = 8
START_S: Final = 5.0
"""How long a start waits for a server: an engine starts with or without one."""


class LinkState(Enum):
    NEW = "not connected yet"
    HEALTHY = "healthy"
    SUSPECT = "being checked"
    DEGRADED = "degraded"
    CLOSED = "closed"


class Registrar(Protocol):
    """Registers a client, each time anew. A scheduler's does no more; a worker's also binds its data path."""

    def register(self, client: Client, chunk_size: int) -> int:
        """Register and return the registration's id, 0 for a client that only looks."""

    def lost(self) -> None:
        """The server is not used any more, until the next `register`: what waits for it need not wait on."""

    def closed(self) -> None:
        """The registration is over; nothing may be in flight any more."""


class Link:
    """One client of one server, kept alive.

    While it is not usable every operation fails at once and says why; the health loop makes it usable again.
    """

    def __init__(
        self,
        client: Client,
        required_alignment: int,
        registrar: Registrar,
        *,
        interval: float = HEARTBEAT_S,
        agreement: ChunkSizeAgreement | None = None,
    ) -> None:
        """`agreement`: what the links of one engine share, which all work with one chunk size."""
        self.client = client
        self.chunk_size = 0
        self.registration_id = 0
        self._agreement = agreement or ChunkSizeAgreement()
        self._interval = interval
        self._retry_s = _FIRST_RETRY_S
        self._told: set[str] = set()
        self._alignment = required_alignment
        self._registrar = registrar
        self._incarnation = b""
        self._state = LinkState.NEW
        self._reason = "the server has not been reached yet"
        self._draining = False
        self._renewals = 0
        self._error: KvwireError | None = None
        self._loop: HealthLoop | None = None
        self._attach: AttachStream | None = None
        self._make_locks()
        client.state.on_new_incarnation.append(self._new_incarnation)
        forks.watch(self)

    def after_fork(self) -> None:
        """The child is another client: it registers on its own when it is first used."""
        self._make_locks()
        forks.keep((self._loop, self._attach))
        self._loop = self._attach = None
        self.registration_id = 0
        if self._state is not LinkState.CLOSED:
            self._state = LinkState.NEW
            self._reason = "this process was forked and has not connected yet"

    def _make_locks(self) -> None:
        self._lock = threading.RLock()
        self._recovering = threading.Lock()
        self._tried = threading.Event()

    @property
    def interval(self) -> float:
        """Seconds until the next heartbeat: sooner after an outage, so that a quick restart costs little."""
        if self._state is not LinkState.DEGRADED:
            return self._interval
        wait, self._retry_s = self._retry_s, 2 * self._retry_s
        return min(wait, self._interval)

    @property
    def is_healthy(self) -> bool:
        """Checked and good. Without a running monitor nothing is healthy."""
        loop = self._loop
        return self.is_usable and loop is not None and loop.is_running

    @property
    def is_usable(self) -> bool:
        return self._state is LinkState.HEALTHY and not self._draining

    @property
    def is_reachable(self) -> bool:
        """Not known to be away: good enough for a farewell that nobody waits for."""
        return self._state in {LinkState.HEALTHY, LinkState.SUSPECT}

    @property
    def degraded_reason(self) -> str:
        """Empty while the server is usable."""
        if self._state is LinkState.HEALTHY:
            return "the server is shutting down" if self._draining else ""
        return self._reason

    def start(self, wait: float = START_S) -> None:
        """Watch the server from now on. Returns when a first attempt to connect is over, or after `wait`."""
        with self._lock:
            if self._loop is None and self._state is not LinkState.CLOSED:
                self._loop = loops.join(str(self.client.target), self)
        self._wake()
        self._tried.wait(wait)

    def require(self) -> None:
        """Raise what keeps the server from being used, as the first attempt to connect found it."""
        if not self.is_usable:
            raise self._error or self.unusable()

    def ensure(self, wait: float = START_S) -> None:
        """Raise Unavailable unless the server is usable. In a forked child the first call connects."""
        if self._state is LinkState.NEW and self._loop is None:
            self.start(wait)
        if not self.is_usable:
            raise self.unusable()

    def unusable(self) -> Unavailable:
        return Unavailable(
            f"The kvwire server at {self.client.target} is not used: {self.degraded_reason.rstrip('.')}.",
            address=self.client.target,
        )

    def report(self, error: KvwireError) -> None:
        """An operation failed: where that casts doubt on the server it is not used until it is checked."""
        if isinstance(error, NotRegistered):
            self._degrade(str(error))
        elif isinstance(error, Draining):
            self._draining = True
        elif isinstance(error, (Unavailable, DeadlineExceeded, TransferTimeout)):
            self._suspect(str(error))
        else:
            return
        self._wake()

    @property
    def error(self) -> KvwireError | None:
        """What the last attempt to connect failed with."""
        return self._error

    def require_chunk_size(self, size: int) -> None:
        """Work with this size, which another part of the engine knows: it may have met another server."""
        if self._agreement.impose(size) and self.chunk_size:
            self.renew(f"the engine works with chunks of {size} tokens", 0)

    def renew(self, reason: str, wait: float) -> None:
        """Have everything set up anew, although the server may be well. Waits for it as `start` does."""
        with self._lock:
            if self._state is LinkState.CLOSED:
                return
            self._state, self._reason = LinkState.NEW, reason
            self._renewals += 1
            self._tried.clear()
        self.start(wait)

    def close(self) -> None:
        """Leave the server. Idempotent, also before the first use."""
        with self._lock:
            if self._state is LinkState.CLOSED:
                return
            polite = self._state is LinkState.HEALTHY
            self._state, self._reason = LinkState.CLOSED, "the client is closed"
            registration_id, self.registration_id = self.registration_id, 0
            attach, self._attach = self._attach, None
            loop, self._loop = self._loop, None
        self._registrar.closed()
        if polite and registration_id:
            try:
                self.client.unregister(registration_id, timeout=_FAREWELL_S)
            except KvwireError as error:
                logger.debug("kvwire: unregistering failed: %s", error)
        if attach is not None:
            attach.cancel()
        # Ends a heartbeat in flight, so that the loop is joined without waiting for its deadline.
        self.client.close()
        if loop is not None:
            loops.leave(str(self.client.target), loop, self)

    def heartbeat(self) -> None:
        if self._state is LinkState.CLOSED:
            return
        renewals = self._renewals
        try:
            if self._state in {LinkState.HEALTHY, LinkState.SUSPECT}:
                problem = self._check()
                if not problem:
                    return
                self._degrade(problem)
            self._recover()
        except KvwireError as error:
            self._error = error
            self._degrade(str(error))
        except Exception as error:
            # A fault of this library, or of a layout that it was given: the loop must go on, unhealthy.
            logger.exception("kvwire: connecting to %s failed", self.client.target)
            self._degrade(f"connecting failed in this process: {error!r}")
        finally:
            # Whoever has renewed it meanwhile waits for the next attempt.
            if renewals == self._renewals:
                self._tried.set()

    def _check(self) -> str:
        """What is wrong with the server, or an empty string."""
        registration_id = self.registration_id
        pong = self._ping(registration_id)
        if isinstance(pong, str):
            # Whatever is in flight hangs in a server that does not even answer a ping.
            self._attach = None
            self.client.reset()
            return pong
        self._draining = pong.draining
        if pong.incarnation != self._incarnation:
            return "the server was restarted"
        if pong.registration_known is False:
            return "the server does not know this client any more"
        if pong.chunk_size != self._agreement.size:
            return f"the server's chunk size is {pong.chunk_size}, not {self._agreement.size}"
        with self._lock:
            if self._state is LinkState.SUSPECT and registration_id == self.registration_id:
                self._state, self._reason = LinkState.HEALTHY, ""
        return ""

    def _ping(self, registration_id: int) -> Pong | str:
        problem = ""
        for _ in range(_PINGS):
            try:
                return self.client.ping(registration_id)
            except DeadlineExceeded as error:
                # Once may be a busy machine.
                problem = str(error)
            except KvwireError as error:
                return str(error)
        return problem

    def _recover(self) -> None:
        """Negotiate, verify, register, attach, in this order. Only then is the server used (again)."""
        with self._recovering:
            if self._state is LinkState.HEALTHY:
                return
            renewals = self._renewals
            # What is set up anew ends the registration that the old stream stands for.
            before, self._attach = self._attach, None
            if before is not None:
                before.cancel()
            negotiated = self.client.negotiate(self._alignment, expected=self._agreement.size)
            self._agreement.accept(negotiated.chunk_size, str(self.client.target))
            self.chunk_size = negotiated.chunk_size
            registration_id = self._registrar.register(self.client, negotiated.chunk_size)
            if registration_id:
                self._attach_to(registration_id)
            if self.client.state.incarnation != negotiated.incarnation:
                raise Unavailable("The server was restarted while this client registered with it.")
            with self._lock:
                # What was asked for meanwhile is not in what was set up: the loop has been woken for it.
                if self._state is LinkState.CLOSED or renewals != self._renewals:
                    return
                was = self._state
                self.registration_id = registration_id
                self._incarnation = negotiated.incarnation
                self._draining = False
                self._state, self._reason = LinkState.HEALTHY, ""
                self._retry_s = _FIRST_RETRY_S
                self._error = None
                self._told.clear()
        if was is LinkState.DEGRADED:
            logger.info("kvwire: the server at %s is used again", self.client.target)

    def _attach_to(self, registration_id: int) -> None:
        """Open the stream and wait for its first event, which says that the server watches it."""
        attached = threading.Event()
        stream = self.client.attach(registration_id)
        ended: list[KvwireError | None] = []

        def watch() -> None:
            error: KvwireError | None = None
            try:
                for event in stream:
                    attached.set()
                    if event.draining_s is not None:
                        self._draining = True
            except KvwireError as exc:
                error = exc
            ended.append(error)
            attached.set()
            self._attach_ended(stream, error)

        self._attach = stream
        threading.Thread(target=watch, name=f"kvwire-attach {self.client.target}", daemon=True).start()
        attached.wait(self.client.deadlines["Attach"] + _FAREWELL_S)
        if ended:
            raise ended[0] or Unavailable("The server ended the Attach stream at once.")

    def _attach_ended(self, stream: AttachStream, error: KvwireError | None) -> None:
        with self._lock:
            if self._attach is not stream:
                return
        self._degrade(str(error) if error else "the server ended the connection")
        self._wake()

    def _new_incarnation(self) -> None:
        if self._recovering.locked():
            return
        self._degrade("the server was restarted")
        self._wake()

    def _suspect(self, reason: str) -> None:
        with self._lock:
            if self._state is LinkState.HEALTHY:
                self._state, self._reason = LinkState.SUSPECT, reason

    def _degrade(self, reason: str) -> None:
        with self._lock:
            if self._state is LinkState.CLOSED:
                return
            before, self._state, self._reason = self._state, LinkState.DEGRADED, reason
            # Once per outage: a heartbeat without end must not fill the log.
            news = reason not in self._told and len(self._told) < _TOLD
            if news:
                self._told.add(reason)
        if news:
            logger.warning("kvwire: the server at %s is not used: %s", self.client.target, reason)
        if before is not LinkState.DEGRADED:
            self._registrar.lost()

    def _wake(self) -> None:
        loop = self._loop
        if loop is not None:
            loop.wake(self)
