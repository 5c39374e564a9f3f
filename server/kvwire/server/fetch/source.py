"""What the memory tier demands of whatever objects are brought from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.errors import KvwireError
    from kvwire.server.store import Space


class Origin(StrEnum):
    """Where a chunk of a hit came from."""

    MEMORY = "memory"
    L2 = "l2"
    PEER = "peer"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A prompt of which not everything is in memory.

    `masks[i]` has the bits of the shards of chunk i that are in memory or come from sources asked before:
    shard (rank, group) is bit `rank * num_groups + group`, as in `ShardMap`.
    """

    space: Space
    keys: Sequence[bytes]
    masks: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A reserved place in the arena for one shard of chunk `index` of the prompt; `view` is writable."""

    index: int
    shard: int
    size: int
    view: memoryview


class Found(Protocol):
    """What one source has of a prompt, held until `release`."""

    @property
    def masks(self) -> Sequence[int]:
        """Per chunk, the shards that it has and that were not in `Wanted.masks`."""

    async def fetch(
        self,
        targets: Sequence[Target],
        done: Callable[[Target, bytes, KvwireError | None], None],
        until: float,
    ) -> None:
        """Fill the targets, a part of what `masks` told, in their order as far as that is possible.

        May be called again, with other targets, also while it runs. Calls `done(target, checksum, error)`
        exactly once for each, on the event loop, as soon as its bytes are there, complete and compared with
        their checksum (xxh3-128), or have failed. After `done`, and after this returns or raises, nothing
        touches the target any more. Gives up at `until` (monotonic seconds). Raises nothing but
        CancelledError.
        """

    async def release(self) -> None:
        """Let go of what is held for this prompt, also of what nobody has fetched. Raises nothing."""


class Source(Protocol):
    """One lower tier, or all other servers. Lives on the event loop; one that fails has nothing."""

    name: str
    origin: Origin

    async def find(self, wanted: Wanted, until: float) -> Found | None:
        """What it has of what is lacking. None: nothing, or it cannot tell in time.

        Raises nothing but CancelledError, and holds nothing then.
        """
