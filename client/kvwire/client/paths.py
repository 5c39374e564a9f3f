"""The data paths of this process: what it can offer, and how the one that the server picked is opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvwire.client.inline import InlinePath
from kvwire.client.types import Offer, Path
from kvwire.errors import ConfigError, DataPathUnavailable
from kvwire.transfer.arena_path import ShmPath
from kvwire.transfer.hosts import host_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.client.client import Client
    from kvwire.client.types import Registered
    from kvwire.transfer.base import DataPath

CHOICES: Final[dict[str, tuple[tuple[Path, ...], ...]]] = {
    # UCX is started only where shared memory is not to be had: it costs time and memory.
    "auto": ((Path.SHM,), (Path.UCX_LOCAL, Path.UCX_REMOTE, Path.INLINE)),
    "shm": ((Path.SHM,),),
    "ucx": ((Path.UCX_LOCAL, Path.UCX_REMOTE),),
    "inline": ((Path.INLINE,),),
}
"""What is offered, in turns: the next ones when nothing of the ones before works."""


@dataclass(frozen=True, slots=True)
class OpenedPath:
    """A proven path. `make` opens an end of it for one thread, `release` gives back what all ends share."""

    name: str
    make: Callable[[], DataPath]
    release: Callable[[], None]


def stages(choice: str) -> tuple[tuple[Path, ...], ...]:
    found = CHOICES.get(choice)
    if found is None:
        raise ConfigError(f"There is no data path {choice!r}: choose one of {', '.join(CHOICES)}.")
    return found


def offers(wanted: Sequence[Path], causes: dict[str, str]) -> tuple[Offer, ...]:
    """Offers for those wanted paths that this process can use. `causes` is told why not the others."""
    found: list[Offer] = []
    for path in wanted:
        if path is Path.INLINE:
            found.append(Offer(path))
        elif path is Path.SHM:
            found.append(Offer(path, host_id()))
        else:
            causes[path.label] = "not built in"
    return tuple(found)


def open_path(client: Client, registered: Registered) -> OpenedPath:
    """Raises when the path turns out not to work."""
    if registered.path is Path.INLINE:
        inline = InlinePath(client, registered.registration_id)
        return OpenedPath(inline.name, lambda: inline, lambda: None)
    if registered.path is Path.SHM and registered.shm is not None:
        access = registered.shm
        shm = ShmPath.open(access.arena_name, access.nonce, access.liveness_name)
        return OpenedPath(shm.name, lambda: shm, shm.close)
    raise DataPathUnavailable(
        f"This client has no data path {registered.path.label}.", path=registered.path.label
    )
