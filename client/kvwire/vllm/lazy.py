"""Stores only what the engine is about to drop: chunks wait in its own prefix cache until their turn comes.

A chunk is worth storing as long as its blocks have the hashes that they had when it was computed: by them the
engine itself would take them for a prefix. While a chunk is copied its blocks are held: nobody gets them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvwire.client.jobs import GroupBlocks
from kvwire.vllm.metadata import Job, Prompt
from kvwire.vllm.plan import BlockPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from kvwire.keys import Namespace
    from kvwire.vllm.tracker import RequestTracker

PREFIX: Final = "kvwire-lazy-"
"""Of the ids of stores whose request may be long gone."""
_HELD_SHARE: Final = 4
PATIENCE_S: Final = 1.0
"""So long a copy is waited for. It takes milliseconds, unless its server hangs."""


@dataclass(slots=True, eq=False)
class _Chunk:
    """`taken`: it is stored, or on its way."""

    key: bytes
    namespace: Namespace
    plan: BlockPlan
    trace: Mapping[str, str]
    blocks: tuple[int, ...]
    hashes: tuple[Any, ...]
    taken: bool = False


@dataclass(slots=True, eq=False)
class _Copy:
    """`waiting`: for so many ranks."""

    blocks: list[Any]
    waiting: int
    began: float


class LazyStores:
    """`pool` is the engine's BlockPool; of its free blocks the first `horizon` are about to be given out.

    What it remembers is bounded by the number of blocks, and a step looks at `horizon` of them.
    """

    def __init__(
        self, pool: Any, horizon: int, world_size: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = pool
        self._horizon = min(horizon, pool.num_gpu_blocks // 2)
        self._world_size = world_size
        self._clock = clock
        self._by_block: dict[int, _Chunk] = {}
        self._copies: dict[str, _Copy] = {}
        self._held = 0
        self._count = 0

    @property
    def frees_soon(self) -> bool:
        """Whether blocks that are held are worth waiting for. Those of a server that hangs are not."""
        if not self._copies:
            return False
        newest = self._copies[next(reversed(self._copies))]
        return self._clock() - newest.began < PATIENCE_S

    def keep(self, tracker: RequestTracker, plan: BlockPlan, chunk_size: int) -> BlockPlan:
        """Remember the chunks of a plan. Returns what is left: blocks that the engine does not cache."""
        left: list[GroupBlocks] = []
        for chunk in plan.chunks:
            groups = tuple(_of_chunk(plan, chunk))
            blocks = tuple(block for each in groups for block in each.block_ids)
            hashes = tuple(self._pool.blocks[block].block_hash for block in blocks)
            if None in hashes:
                left.extend(groups)
            elif blocks:
                (key,) = tracker.keys(range(chunk, chunk + 1), chunk_size)
                self._remember(
                    _Chunk(key, tracker.namespace, BlockPlan(groups), tracker.trace, blocks, hashes)
                )
        return BlockPlan(tuple(left))

    def due(self) -> list[Job]:
        """Stores to begin now, because the engine may give their blocks to somebody else soon."""
        if not self._by_block:
            return []
        return [self._begin(chunk) for chunk in self._near_the_end()]

    def ended(self, request_id: str, ranks: int) -> None:
        """So many ranks have ended a store of this id, well or not. It is not tried again."""
        copy = self._copies.get(request_id)
        if copy is None:
            return
        copy.waiting -= ranks
        if copy.waiting <= 0:
            del self._copies[request_id]
            self._held -= len(copy.blocks)
            # Tail first, as the engine frees them.
            self._pool.free_blocks(reversed(copy.blocks))

    def forget(self) -> None:
        """Nothing that is remembered may be stored any more."""
        self._by_block.clear()

    def _remember(self, chunk: _Chunk) -> None:
        known = self._by_block.get(chunk.blocks[0])
        if known is not None and (known.key, known.hashes) == (chunk.key, chunk.hashes):
            return
        for block in chunk.blocks:
            self._by_block[block] = chunk

    def _near_the_end(self) -> list[_Chunk]:
        """Chosen before any is held: holding a block takes it out of the queue that is walked."""
        room = self._pool.num_gpu_blocks // _HELD_SHARE - self._held
        chosen: list[_Chunk] = []
        for position, block in enumerate(self._pool.free_block_queue.iter_blocks_after(None)):
            if position >= self._horizon:
                break
            chunk = self._by_block.get(block.block_id)
            if chunk is None or chunk.taken:
                continue
            if not self._is_whole(chunk):
                self._drop(chunk)
                continue
            room -= len(chunk.blocks)
            if room < 0:
                break
            chunk.taken = True
            chosen.append(chunk)
        return chosen

    def _is_whole(self, chunk: _Chunk) -> bool:
        blocks = self._pool.blocks
        return all(
            blocks[block].block_hash == found for block, found in zip(chunk.blocks, chunk.hashes, strict=True)
        )

    def _drop(self, chunk: _Chunk) -> None:
        for block in chunk.blocks:
            if self._by_block.get(block) is chunk:
                del self._by_block[block]

    def _begin(self, chunk: _Chunk) -> Job:
        self._count += 1
        request_id = f"{PREFIX}{self._count}"
        blocks = [self._pool.blocks[block] for block in chunk.blocks]
        self._pool.touch(blocks)
        self._held += len(blocks)
        self._copies[request_id] = _Copy(blocks, self._world_size, self._clock())
        prompt = Prompt(request_id, chunk.namespace, (chunk.key,))
        return Job(request_id, prompt, chunk.plan, chunk.trace)


def horizon(batched_tokens: int, requests: int, spans: Iterable[int]) -> int:
    """How many blocks the next two steps may take: one while the copies run, and one more."""
    return 2 * sum(-(-batched_tokens // span) + requests for span in spans)


def _of_chunk(plan: BlockPlan, chunk: int) -> Iterator[GroupBlocks]:
    for each in plan.groups:
        if each.first_chunk <= chunk < each.first_chunk + each.chunk_count:
            yield GroupBlocks(each.group_index, chunk, 1, each.blocks_of(chunk))
