"""What a lower tier demands of the storage below it: whole values under names, all or nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

Buffer = bytes | bytearray | memoryview

NAME_BYTES: Final = 512
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,199})*")


class BackendError(Exception):
    """Base of what a backend raises. The text is for the operator and holds no credentials."""


class NotFound(BackendError):
    """There is no value under this name (any more)."""


class WrongSize(BackendError):
    """The value has another length than was asked for. The buffers hold anything."""


class Unavailable(BackendError):
    """Not reached, or not answered in time: worth another attempt. A write may have happened or not."""


class Refused(BackendError):
    """Denied, misconfigured or too large: the same call fails again."""


class Full(Refused):
    """No room for the value. Works again when something has been deleted."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of a listing. `size` is the sum of what was written, in bytes."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Room:
    """What the storage tells about itself, in bytes. None: it does not tell."""

    used: int | None = None
    free: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a backend keeps its values, read from a URL. Holds no credentials: they are in the environment.

    `location` is a folder, a bucket, a container or HOST:PORT. Every name is below `prefix`, which may be
    empty. `timeout` in seconds is for one attempt of one call without progress; `options` has what else the
    URL says.
    """

    scheme: str
    location: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    timeout: float = 10.0
    options: Mapping[str, str] = field(default_factory=dict)


class Backend(Protocol):
    """One storage. Lives on the event loop and never blocks it; calls may run side by side.

    Raises BackendError, never the errors of a library. Does not repeat what failed. After a call has
    returned or raised, CancelledError too, nothing touches its buffers any more; so a cancelled call may take
    a while to end.
    """

    scheme: str
    max_size: int
    """Bytes of the largest value."""

    async def open(self) -> None:
        """Once before all else; again after it has raised Unavailable. Reaches the storage, takes a folder
        for itself and removes what killed writers have left there. ConfigError: another server has it."""

    async def write(self, name: str, parts: Sequence[Buffer]) -> None:
        """The parts, one after the other, become the value of this name: at once as a whole, or not at all.

        A value that was there is replaced. Of several writers at a time, one wins as a whole. What a failed
        or killed write leaves is never listed and never readable.
        """

    async def read(self, name: str, parts: Sequence[memoryview]) -> None:
        """The value of this name, into the writable parts one after the other. NotFound; WrongSize unless it
        is as long as the parts together."""

    async def delete(self, names: Sequence[str]) -> None:
        """These values are gone. One that was not there is no error."""

    def list(self, prefix: str = "") -> AsyncIterator[Sequence[Entry]]:
        """Pages of all values below a prefix that ends at a slash, or of all. Reads no values."""

    async def room(self) -> Room:
        """How full the storage is, this tier's values or not."""

    async def close(self) -> None:
        """Ends what is under way. Raises nothing; a second time does nothing."""


def checked(name: str) -> str:
    """The name, if every storage can hold it: parts of letters, digits, `.`, `_` and `-`, none of which
    begins with a dot. Raises ValueError."""
    if len(name) > NAME_BYTES or not _NAME.fullmatch(name):
        raise ValueError(f"no name for a stored value: {name!r}")
    return name


def total(parts: Sequence[Buffer]) -> int:
    """Bytes of all parts together."""
    return sum(len(part) if isinstance(part, bytes | bytearray) else part.nbytes for part in parts)
