from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvwire.errors import (
    BindingIncomplete,
    ChunkSizeIncompatible,
    ChunkSizeNotNegotiated,
    ConfigError,
    ResizeRefused,
)
from kvwire.keys import final_chunk_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class Binder:
    """A part of the server that takes over the chunk size.

    `bind` either takes it over or raises. It is called again after it raised, possibly with another size.
    """

    name: str
    bind: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class BoundSize:
    """The chunk size in tokens, the alignment it was made from, and the client that asked for it first."""

    chunk_size: int
    alignment: int
    bound_by: str


class BinderState(StrEnum):
    PENDING = "pending"
    BOUND = "bound"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class BinderStatus:
    name: str
    state: BinderState
    failures: int
    last_error: str


@dataclass(frozen=True, slots=True)
class BindingStatus:
    """`chosen` is None before the first negotiation, and is in force only when `complete`."""

    minimum: int
    maximum: int
    chosen: BoundSize | None
    complete: bool
    sessions_started: bool
    binders: tuple[BinderStatus, ...]


class ChunkSizeBinding:
    """One server, one chunk size, for good. Single-threaded; a binder must not call back into `negotiate`."""

    def __init__(self, minimum: int, maximum: int, binders: Sequence[Binder]) -> None:
        if not 1 <= minimum <= maximum:
            raise ConfigError(f"--chunk-size {minimum} must be from 1 to --max-chunk-size {maximum}.")
        names = [binder.name for binder in binders]
        if len(set(names)) != len(names):
            raise ValueError("binders must have different names")
        self._minimum = minimum
        self._maximum = maximum
        self._binders = tuple(binders)
        self._chosen: BoundSize | None = None
        self._done = 0
        self._complete = False
        self._running = False
        self._sessions_started = False
        self._failures: Counter[str] = Counter()
        self._last_error = ""

    @property
    def bound(self) -> BoundSize | None:
        """The size in force, or None while any binder has not taken it over."""
        return self._chosen if self._complete else None

    def require(self) -> int:
        """The chunk size in tokens. Raises ChunkSizeNotNegotiated while there is none in force."""
        if self.bound is not None:
            return self.bound.chunk_size
        if self._chosen is None:
            raise ChunkSizeNotNegotiated("This server has no chunk size yet: call NegotiateChunkSize first.")
        raise ChunkSizeNotNegotiated(
            f"Chunk size {self._chosen.chunk_size} is not in force, {self._next_binder()!r} must take it"
            f" over first: call NegotiateChunkSize with alignment {self._chosen.alignment} again.",
            alignment=self._chosen.alignment,
            binder=self._next_binder(),
        )

    def negotiate(self, alignment: int, who: str, expected: int = 0) -> BoundSize:
        """The one size of the server, if it is a multiple of `alignment` tokens. The first caller settles it.

        Raises AlignmentInvalid or AlignmentTooLarge for bad input, in every state and without effect;
        ChunkSizeIncompatible when another size is in force, or when it would not be `expected`, the only one
        that the caller can use (0: any), which then binds nothing; BindingIncomplete when a binder failed or
        has yet to be retried with the first caller's alignment; ResizeRefused instead when sessions have
        started.
        """
        wanted = BoundSize(final_chunk_size(self._minimum, alignment, self._maximum), alignment, who)
        size = (self._chosen or wanted).chunk_size
        if expected not in {0, size}:
            raise _unexpected(size, expected, who)
        if self.bound is not None:
            return _compatible(self.bound, alignment)
        chosen = self._choose(wanted)
        self._bind(chosen)
        return chosen

    def session_started(self) -> None:
        """Refuse every resize from now on, also when all sessions have ended."""
        self._sessions_started = True

    def status(self) -> BindingStatus:
        return BindingStatus(
            self._minimum,
            self._maximum,
            self._chosen,
            self._complete,
            self._sessions_started,
            tuple(self._binder_status(position) for position in range(len(self._binders))),
        )

    def _choose(self, wanted: BoundSize) -> BoundSize:
        chosen = self._chosen
        if chosen is None or chosen.alignment == wanted.alignment:
            chosen = chosen or wanted
        elif self._sessions_started and chosen.chunk_size != wanted.chunk_size:
            raise ResizeRefused(
                f"Sessions have started with chunk size {chosen.chunk_size}, which can never change again: "
                f"alignment {wanted.alignment} needs a server of its own.",
                bound_size=chosen.chunk_size,
                alignment=wanted.alignment,
            )
        elif self._done or self._running:
            raise self._incomplete(chosen)
        else:
            chosen = wanted
        self._chosen = chosen
        return chosen

    def _bind(self, chosen: BoundSize) -> None:
        if self._running:
            raise self._incomplete(chosen)
        self._running = True
        try:
            while self._done < len(self._binders):
                self._bind_next(chosen)
        finally:
            self._running = False
        self._complete = True

    def _bind_next(self, chosen: BoundSize) -> None:
        binder = self._binders[self._done]
        try:
            binder.bind(chosen.chunk_size)
        except Exception as error:
            self._failures[binder.name] += 1
            self._last_error = f"{type(error).__name__}: {error}"
            raise self._incomplete(chosen) from error
        self._done += 1
        self._last_error = ""

    def _incomplete(self, chosen: BoundSize) -> BindingIncomplete:
        return BindingIncomplete(
            f"{self._next_binder()!r} has not taken over chunk size {chosen.chunk_size}: repeat "
            f"NegotiateChunkSize with alignment {chosen.alignment}, first asked for by {chosen.bound_by!r}.",
            pending_size=chosen.chunk_size,
            pending_alignment=chosen.alignment,
            bound_by=chosen.bound_by,
            binder=self._next_binder(),
        )

    def _next_binder(self) -> str:
        return self._binders[self._done].name

    def _binder_status(self, position: int) -> BinderStatus:
        name = self._binders[position].name
        if position < self._done:
            return BinderStatus(name, BinderState.BOUND, self._failures[name], "")
        failed = position == self._done and bool(self._last_error)
        state = BinderState.FAILED if failed else BinderState.PENDING
        return BinderStatus(name, state, self._failures[name], self._last_error if failed else "")


def _compatible(bound: BoundSize, alignment: int) -> BoundSize:
    if bound.chunk_size % alignment:
        raise ChunkSizeIncompatible(
            f"The server's chunk size is {bound.chunk_size} for good (alignment {bound.alignment}, asked for "
            f"by {bound.bound_by!r}), no multiple of {alignment}: use another server for this model.",
            bound_size=bound.chunk_size,
            bound_alignment=bound.alignment,
            bound_by=bound.bound_by,
            alignment=alignment,
        )
    return bound


def _unexpected(size: int, expected: int, who: str) -> ChunkSizeIncompatible:
    return ChunkSizeIncompatible(
        f"The server's chunk size is {size}, but {who} works with {expected}: start the server with "
        f"--chunk-size {expected}, or restart the engine.",
        bound_size=size,
        expected=expected,
    )
