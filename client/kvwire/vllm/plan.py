"""Which tokens to promise, which blocks to fill and to store. Only here do tokens become blocks. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.client.jobs import NOT_WANTED, GroupBlocks
from kvwire.vllm.layout import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvwire.vllm.layout import ChunkCut, GroupCut

    Table = Sequence[int]


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """What one transfer touches, group by group. Empty: nothing to do."""

    groups: tuple[GroupBlocks, ...]

    @property
    def chunks(self) -> range:
        """From the first chunk of any group to the last one."""
        if not self.groups:
            return range(0)
        stop = max(group.first_chunk + group.chunk_count for group in self.groups)
        return range(min(group.first_chunk for group in self.groups), stop)

    @property
    def block_ids(self) -> frozenset[int]:
        return frozenset(each for group in self.groups for each in group.block_ids if each != NOT_WANTED)


class PlanError(Exception):
    """The engine's block table does not have what was promised."""


def tokens_to_ask(cut: ChunkCut, num_tokens: int) -> int:
    """How many of a prompt's tokens a lookup names: whole chunks only.

    A window group can be resumed at chunk boundaries alone, so with one the hit must leave a token by itself.
    """
    usable = num_tokens - 1 if cut.layout.has_windows else num_tokens
    return max(0, usable) // cut.chunk_size * cut.chunk_size


def resume_point(cut: ChunkCut, hit_tokens: int, num_tokens: int) -> int:
    """Where the engine resumes after a hit: after whole blocks of every group, before the last token."""
    last = (num_tokens - 1) // cut.layout.alignment * cut.layout.alignment
    if hit_tokens <= last:
        return hit_tokens
    return 0 if cut.layout.has_windows else last


def external_tokens(cut: ChunkCut, hit_tokens: int, num_tokens: int, num_computed: int) -> int:
    """How many tokens a load brings beyond those that the engine has itself. Never negative."""
    return max(0, resume_point(cut, hit_tokens, num_tokens) - num_computed)


def load_plan(cut: ChunkCut, tables: Sequence[Table], start: int, end: int) -> BlockPlan:
    """The blocks that bring tokens [start, end), without those that the engine holds already.

    Raises PlanError when the table lacks a block, or the objects do not hold one.
    """
    groups: list[GroupBlocks] = []
    for index, group in cut:
        table = tables[group.group.engine_index]
        wanted = frozenset(_blocks_to_load(group, table, start, end))
        chunks = sorted({block // group.blocks_per_chunk for block in wanted})
        rows = {
            chunk: tuple(
                table[block] if block in wanted else NOT_WANTED for block in group.object_blocks(chunk)
            )
            for chunk in chunks
        }
        if sum(each != NOT_WANTED for ids in rows.values() for each in ids) != len(wanted):
            raise PlanError(f"objects of {group.rows} blocks do not hold all of the blocks {sorted(wanted)}")
        groups.extend(_group_blocks(index, rows))
    return BlockPlan(tuple(groups))


def store_plan(cut: ChunkCut, tables: Sequence[Table], chunks: range) -> BlockPlan:
    """The blocks of these chunks. Objects of which the engine has dropped a block are left out."""
    groups: list[GroupBlocks] = []
    for index, group in cut:
        table = tables[group.group.engine_index]
        rows = {
            chunk: tuple(table[block] for block in group.object_blocks(chunk))
            for chunk in chunks
            if _is_complete(group, table, chunk)
        }
        groups.extend(_group_blocks(index, rows))
    return BlockPlan(tuple(groups))


def _blocks_to_load(group: GroupCut, table: Table, start: int, end: int) -> list[int]:
    span = group.group.span_tokens
    if start % span or end % span or end // span > len(table):
        raise PlanError(
            f"the engine has {len(table)} blocks of {span} tokens for the tokens {start} to {end}"
        )
    wanted = range(max(start // span, group.group.first_needed_block(end)), end // span)
    present = [block for block in wanted if table[block] != NULL_BLOCK]
    if len(present) != len(wanted) and not group.group.window_has_holes:
        raise PlanError(f"the engine has no block for some of the tokens {start} to {end}")
    return present


def _is_complete(group: GroupCut, table: Table, chunk: int) -> bool:
    blocks = group.object_blocks(chunk)
    if blocks.stop > len(table):
        return False
    if group.group.window_has_holes:
        # Nobody loads the blocks that no boundary needs: the null block's bytes stand in for them.
        return table[blocks[-1]] != NULL_BLOCK
    return all(table[block] != NULL_BLOCK for block in blocks)


def _group_blocks(index: int, rows: dict[int, tuple[int, ...]]) -> Iterator[GroupBlocks]:
    for run in _runs(rows):
        ids = tuple(each for chunk in run for each in rows[chunk])
        yield GroupBlocks(index, run.start, len(run), ids)


def _runs(numbers: Iterable[int]) -> list[range]:
    """Ascending numbers as ranges without gaps."""
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs
