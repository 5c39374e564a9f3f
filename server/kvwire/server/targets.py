"""Which chunks and objects a store or a retrieve means."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvwire.errors import InvalidArgument, RangeInvalid, SessionUnknown
from kvwire.keys import DIGEST_SIZE
from kvwire.server.messages import KeyedChunks, SessionRange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.server.messages import ObjectRange, Target
    from kvwire.server.registry import Registration
    from kvwire.server.sessions import Session
    from kvwire.server.state import EngineState
    from kvwire.server.store import Space

_MAX_TAILS: Final = 4096


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """Consecutive chunks of a prompt, from chunk `first` on, and the known keys right `before` them."""

    space: Space
    keys: Sequence[bytes]
    first: int
    before: Sequence[bytes]
    tokens: bytes = b""

    @property
    def parent_key(self) -> bytes:
        """Empty for a head and when it is not known."""
        return self.before[-1] if self.before else b""


@dataclass(frozen=True, slots=True)
class _Tail:
    space: Space
    next_chunk: int
    last_key: bytes


class Targets:
    """Resolves targets. Remembers where keyed ranges of a session ended: the next one finds its parent."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._tails: OrderedDict[tuple[str, str], _Tail] = OrderedDict()

    def resolve(self, registration: Registration, target: Target, now: float) -> ChunkRange:
        """Raises SessionUnknown, RangeInvalid or InvalidArgument."""
        if isinstance(target, SessionRange):
            return self._in_session(registration, target, now)
        return self._by_keys(registration, target, now)

    def _in_session(self, registration: Registration, target: SessionRange, now: float) -> ChunkRange:
        session = self._session(registration, target.session_id, now)
        if session is None or not session.space.shards.same_as(registration.shards):
            raise SessionUnknown(
                f"Session {target.session_id!r} is not known: look the prompt up again.",
                session_id=target.session_id,
            )
        _check_base(registration, session.space)
        first, count, known = target.first_chunk, target.chunk_count, len(session.keys)
        if first < 0 or count < 1 or first + count > known:
            raise RangeInvalid(
                f"Chunks {first} to {first + count} are not within the {known} chunks of the session.",
                first=first,
                count=count,
                limit=known,
            )
        keys = session.keys
        return ChunkRange(session.space, keys[first : first + count], first, keys[:first], session.tokens)

    def _by_keys(self, registration: Registration, target: KeyedChunks, now: float) -> ChunkRange:
        if not target.keys or any(len(key) != DIGEST_SIZE for key in target.keys):
            raise InvalidArgument("keys", f"must be one or more keys of {DIGEST_SIZE} bytes")
        if target.first_chunk < 0:
            raise InvalidArgument("first_chunk", f"{target.first_chunk} is not a position")
        space = self._state.spaces.open(target.namespace, self._state.chunk_size)
        if space is None:
            raise InvalidArgument("namespace", "is not the one of this registration")
        _check_base(registration, space)
        before = self._keys_before(registration, target, space, now)
        return ChunkRange(space, target.keys, target.first_chunk, before)

    def _keys_before(
        self, registration: Registration, target: KeyedChunks, space: Space, now: float
    ) -> Sequence[bytes]:
        if not target.session_id:
            return ()
        session = self._session(registration, target.session_id, now)
        if session is not None and session.space is space and target.first_chunk <= len(session.keys):
            return _extend(session, target)
        return self._continue_tail(registration.client.engine_id, target, space)

    def _continue_tail(self, engine_id: str, target: KeyedChunks, space: Space) -> Sequence[bytes]:
        name = (engine_id, target.session_id)
        tail = self._tails.pop(name, None)
        next_chunk = target.first_chunk + len(target.keys)
        self._tails[name] = _Tail(space, next_chunk, target.keys[-1])
        if len(self._tails) > _MAX_TAILS:
            self._tails.popitem(last=False)
        if tail is None or tail.space is not space or tail.next_chunk != target.first_chunk:
            return ()
        return (tail.last_key,)

    def _session(self, registration: Registration, session_id: str, now: float) -> Session | None:
        session = self._state.sessions.get(registration.client.engine_id, session_id)
        if session is not None:
            session.last_used = now
        return session


def plan_objects(ranges: Sequence[ObjectRange], chunks: ChunkRange) -> list[tuple[int, Sequence[int]]]:
    """(chunk position, its groups) for all objects that are meant, in order. Raises RangeInvalid."""
    end = chunks.first + len(chunks.keys)
    num_groups = chunks.space.shards.num_groups
    if not ranges:
        return [(index, range(num_groups)) for index in range(chunks.first, end)]
    groups_of: dict[int, set[int]] = {}
    for picked in ranges:
        last = picked.first_chunk + picked.chunk_count
        if picked.chunk_count < 1 or picked.first_chunk < chunks.first or last > end:
            raise RangeInvalid(
                f"Chunks {picked.first_chunk} to {last} are not within chunks {chunks.first} to {end}.",
                first=picked.first_chunk,
                count=picked.chunk_count,
                limit=end,
            )
        if not 0 <= picked.group_index < num_groups:
            raise RangeInvalid(
                f"KV group {picked.group_index} is not one of the {num_groups} of the layout.",
                first=picked.group_index,
                count=1,
                limit=num_groups,
            )
        for index in range(picked.first_chunk, last):
            groups_of.setdefault(index, set()).add(picked.group_index)
    return [(index, sorted(groups_of[index])) for index in sorted(groups_of)]


def _extend(session: Session, target: KeyedChunks) -> Sequence[bytes]:
    first = target.first_chunk
    known = session.keys[first : first + len(target.keys)]
    if tuple(known) != target.keys[: len(known)]:
        raise InvalidArgument("keys", f"are not those of session {session.session_id!r} at chunk {first}")
    session.keys += target.keys[len(known) :]
    return session.keys[:first]


def _check_base(registration: Registration, space: Space) -> None:
    if space.base_root != registration.base_root:
        raise InvalidArgument("namespace", "is not the one of this registration")
