from __future__ import annotations

from dataclasses import dataclass, field
from heapq import nsmallest
from operator import attrgetter
from typing import TYPE_CHECKING

from kvwire.errors import TooManySessions
from kvwire.keys import TOKEN_BYTES, ExtraInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvwire.server.leases import LookupLease
    from kvwire.server.store import Space


@dataclass(slots=True, eq=False)
class Session:
    """One request of one engine: the key chain of its prompt, and at most one lookup lease.

    `tokens` are the packed whole chunks that the first of `keys` were made from, with `extras`.
    """

    engine_id: str
    session_id: str
    generation: int
    space: Space
    last_used: float
    keys: list[bytes] = field(default_factory=list, repr=False)
    tokens: bytes = field(default=b"", repr=False)
    extras: tuple[ExtraInput, ...] = ()
    lease: LookupLease | None = field(default=None, repr=False)
    # How often it was looked up: an older lookup that is still hashing must not overwrite a newer one.
    lookups: int = 0
    counted_chunks: int = 0

    def known_keys(self, space: Space, packed: bytes, extras: Sequence[ExtraInput]) -> list[bytes]:
        """Keys of the first chunks of a prompt that this session has hashed before."""
        step = space.shards.chunk_size * TOKEN_BYTES
        count = min(len(self.tokens), len(packed)) // step
        if space is not self.space or not count:
            return []
        prefix = self.tokens if len(self.tokens) == count * step else self.tokens[: count * step]
        end = count * space.shards.chunk_size
        if not packed.startswith(prefix) or _before(end, extras) != _before(end, self.extras):
            return []
        return self.keys[:count]

    def learn(self, space: Space, keys: list[bytes], tokens: bytes, extras: tuple[ExtraInput, ...]) -> None:
        """Take over a prompt's chain; one that is only the start of the known chain changes nothing."""
        if space is self.space and self.keys[: len(keys)] == keys and len(tokens) <= len(self.tokens):
            return
        self.space = space
        self.keys = keys
        self.tokens = tokens
        self.extras = extras


class Sessions:
    """Sessions by (engine, id). They end when told, or after `ttl` seconds without use."""

    def __init__(self, ttl: float, limit: int, on_first: Callable[[], None] | None = None) -> None:
        self._ttl = ttl
        self._limit = limit
        self._on_first = on_first
        self._by_engine: dict[str, dict[str, Session]] = {}
        self._count = 0
        self._generation = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Session]:
        for sessions in self._by_engine.values():
            yield from sessions.values()

    @property
    def started(self) -> bool:
        """Whether there has ever been a session."""
        return self._generation > 0

    def get(self, engine_id: str, session_id: str) -> Session | None:
        sessions = self._by_engine.get(engine_id)
        return sessions.get(session_id) if sessions else None

    def open(self, engine_id: str, session_id: str, space: Space, now: float) -> Session:
        """The session, made if it is new. Raises TooManySessions."""
        session = self.get(engine_id, session_id)
        if session is not None:
            session.last_used = now
            return session
        if self._count >= self._limit:
            raise TooManySessions(f"The server has {self._limit} sessions, its limit.", allowed=self._limit)
        if not self._generation and self._on_first:
            self._on_first()
        self._generation += 1
        session = Session(engine_id, session_id, self._generation, space, now)
        self._by_engine.setdefault(engine_id, {})[session_id] = session
        self._count += 1
        return session

    def is_current(self, session: Session) -> bool:
        """Whether the session has not ended; one that was made again under the same id is another one."""
        return self.get(session.engine_id, session.session_id) is session

    def of_engine(self, engine_id: str) -> list[Session]:
        return list(self._by_engine.get(engine_id, {}).values())

    def page(self, after: int, count: int) -> list[Session]:
        """Up to `count` sessions, oldest first, of those with a generation above `after`."""
        newer = (session for session in self if session.generation > after)
        return nsmallest(count, newer, key=attrgetter("generation"))

    def idle(self, now: float) -> list[Session]:
        return [session for session in self if session.last_used + self._ttl <= now]

    def remove(self, session: Session) -> bool:
        """Forget exactly this session. False when it has ended before, also if its id is in use again."""
        if not self.is_current(session):
            return False
        sessions = self._by_engine[session.engine_id]
        del sessions[session.session_id]
        if not sessions:
            del self._by_engine[session.engine_id]
        self._count -= 1
        return True


def _before(end: int, extras: Sequence[ExtraInput]) -> list[tuple[int, bytes, int]]:
    return sorted((extra.start, extra.digest, extra.length) for extra in extras if extra.start < end)
