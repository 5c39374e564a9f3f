"""What the servers hold of what this engine knows, told as changes: never something that is not there.

A chunk is told as stored when every server has announced it *and* a request of this engine has named it: only
then are its tokens and the engine's own block hashes known. Whatever is lost on the way is told as removed.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvwire.client.types import EventKind
from kvwire.errors import KvwireError

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterable

    from kvwire.client.client import Client
    from kvwire.client.types import KvEvent, KvEvents
    from kvwire.keys import Namespace

logger = logging.getLogger(__name__)

MAX_PRESENT: Final = 131_072
"""Chunks of one server that are remembered as present. The oldest go: they are not told, which is no lie."""
MAX_PENDING: Final = 8192
"""Chunks with their tokens that some server has not announced yet."""
MAX_TOLD: Final = 65_536
"""Chunks that are told as stored. The oldest are told as removed when there are more."""
RETRY_S: Final = 1.0
_MAX_RETRY_S: Final = 10.0
_SILENT_TRIES: Final = 2


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk in the engine's words. `hashes` has one entry per block of `block_size` tokens."""

    hashes: tuple[Any, ...]
    parent: Any
    tokens: array[int] = field(repr=False)
    block_size: int
    details: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Gone:
    """`hashes` of a chunk that was told as stored."""

    hashes: tuple[Any, ...]


Told: TypeAlias = Chunk | Gone
Keys: TypeAlias = tuple[bytes, ...]
"""One chunk's key at each server."""


class EventBook:
    """Joins what servers announce with what requests name. Safe in threads, and bounded."""

    def __init__(
        self,
        servers: int = 1,
        *,
        max_present: int = MAX_PRESENT,
        max_pending: int = MAX_PENDING,
        max_told: int = MAX_TOLD,
    ) -> None:
        self._lock = threading.Lock()
        self._present: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(servers)]
        self._owner: dict[tuple[int, bytes], Keys] = {}
        self._pending: OrderedDict[Keys, Chunk] = OrderedDict()
        self._told: OrderedDict[Keys, tuple[Any, ...]] = OrderedDict()
        self._news: list[Told] = []
        self._max_present, self._max_pending, self._max_told = max_present, max_pending, max_told

    def knows(self, keys: Keys) -> bool:
        """Whether naming this chunk would change nothing."""
        return keys in self._told or keys in self._pending

    def name(self, keys: Keys, chunk: Chunk) -> None:
        """A request of this engine has this chunk."""
        with self._lock:
            if self.knows(keys):
                return
            self._pending[keys] = chunk
            for server, key in enumerate(keys):
                self._owner[server, key] = keys
            self._tell(keys)
            while len(self._pending) > self._max_pending:
                self._forget(self._pending.popitem(last=False)[0])

    def announced(self, server: int, events: Iterable[KvEvent]) -> None:
        with self._lock:
            for event in events:
                if event.kind is EventKind.STORE:
                    self._arrived(server, event.chunk_key)
                elif event.kind is EventKind.DELETE:
                    self._left(server, event.chunk_key)
                elif event.kind is EventKind.CLEAR:
                    self._lost(server)

    def lost(self, server: int) -> None:
        """Nothing is known of this server any more."""
        with self._lock:
            self._lost(server)

    def take(self) -> list[Told]:
        """What has changed since the last call, in order."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def _arrived(self, server: int, key: bytes) -> None:
        present = self._present[server]
        present[key] = None
        if len(present) > self._max_present:
            self._left(server, next(iter(present)))
        keys = self._owner.get((server, key))
        if keys is not None:
            self._tell(keys)

    def _left(self, server: int, key: bytes) -> None:
        self._present[server].pop(key, None)
        keys = self._owner.get((server, key))
        if keys is not None and keys in self._told:
            self._withdraw(keys)

    def _lost(self, server: int) -> None:
        self._present[server].clear()
        for keys in list(self._told):
            self._withdraw(keys)

    def _tell(self, keys: Keys) -> None:
        if keys not in self._pending or any(
            key not in present for key, present in zip(keys, self._present, strict=True)
        ):
            return
        chunk = self._pending.pop(keys)
        self._told[keys] = chunk.hashes
        self._news.append(chunk)
        while len(self._told) > self._max_told:
            self._withdraw(next(iter(self._told)))

    def _withdraw(self, keys: Keys) -> None:
        self._news.append(Gone(self._told.pop(keys)))
        self._forget(keys)

    def _forget(self, keys: Keys) -> None:
        for server, key in enumerate(keys):
            self._owner.pop((server, key), None)


class EventReader:
    """Follows the events of one server into the book, on a thread of its own, until it is closed.

    A stream that breaks is taken up where it broke. If that does not work at once, or something was lost,
    everything that was told of this server is withdrawn.
    """

    def __init__(
        self,
        client: Client,
        namespace: Namespace,
        book: EventBook,
        server: int,
        on_loss: Callable[[], None],
        *,
        retry: float = RETRY_S,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._book = book
        self._server = server
        self._on_loss = on_loss
        self._retry = retry
        self._incarnation = b""
        self._sequence = 0
        self._failures = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvwire-events-{server}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._client.close()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                if self._follow():
                    continue
            except KvwireError as error:
                logger.debug("kvwire: KV events: %s", error)
            except Exception:
                if self._closed.is_set():
                    return
                logger.exception("kvwire: KV events cannot be followed")
            self._failures += 1
            if self._failures == _SILENT_TRIES:
                self._lost("the server cannot be reached")
            self._closed.wait(min(self._retry * self._failures, _MAX_RETRY_S))

    def _follow(self) -> bool:
        """Until the stream ends. True: another run of the server has answered, and is to be asked anew."""
        # From the start of what the server remembers: what it stored before this engine came counts too.
        pages = self._client.subscribe_kv_events(
            self._namespace, resume_after=self._sequence, from_oldest=not self._sequence
        )
        try:
            for page in pages:
                self._failures = 0
                if not self._take(page):
                    return True
        finally:
            pages.close()
        return False

    def _take(self, page: KvEvents) -> bool:
        """False: the position meant another run, so that the stream has to be asked for anew."""
        is_first = not self._incarnation
        if page.incarnation != self._incarnation:
            resumed = self._sequence > 0
            self._incarnation, self._sequence = page.incarnation, 0
            if not is_first:
                self._lost("the server was started anew")
            if resumed:
                return False
        elif page.lost:
            self._lost("the server has dropped events that were not read in time")
        self._book.announced(self._server, page.events)
        self._sequence = page.sequence
        return True

    def _lost(self, reason: str) -> None:
        if self._incarnation:
            logger.warning("kvwire: KV events were lost, all that was announced is withdrawn: %s", reason)
            self._on_loss()
        self._book.lost(self._server)
