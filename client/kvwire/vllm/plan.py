"""Which tokens to promise, which blocks to fill and to store. Only here do tokens become blocks. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kvwire.client.jobs import NOT_WANTED, GroupBlocks
from kvwire.vllm.layout import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvwire.vllm.layout import ChunkCut, GroupCut

    Table = Sequence[int]
    States = Mapping[tuple[int, int], int]
    """The block that holds the state of an engine's group, by its index, after a number of tokens."""


NO_STATES: Final[States] = MappingProxyType({})


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

    Where chunk boundaries alone can be resumed at, the hit must leave a token by itself.
    """
    usable = num_tokens - 1 if cut.layout.resumes_at_chunks_only else num_tokens
    return max(0, usable) // cut.chunk_size * cut.chunk_size


def resume_point(cut: ChunkCut, hit_tokens: int, num_tokens: int) -> int:
    """Where the engine resumes after a hit: after whole blocks of every group, before the last token."""
    last = (num_tokens - 1) // cut.layout.alignment * cut.layout.alignment
    if hit_tokens <= last:
        return hit_tokens
    return 0 if cut.layout.resumes_at_chunks_only else last


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


def store_plan(
    cut: ChunkCut, tables: Sequence[Table], chunks: range, states: States = NO_STATES
) -> BlockPlan:
    """The blocks of these chunks. Objects of which the engine has dropped a block are left out.

    `states` are the recurrent states that exist: a table does not tell them from blocks in use.
    """
    groups: list[GroupBlocks] = []
    for index, group in cut:
        if group.group.is_recurrent:
            rows = _state_rows(group, cut.chunk_size, chunks, states)
        else:
            table = tables[group.group.engine_index]
            rows = {
                chunk: tuple(table[block] for block in group.object_blocks(chunk))
                for chunk in chunks
                if _is_complete(group, table, chunk)
            }
        groups.extend(_group_blocks(index, rows))
    return BlockPlan(tuple(groups))


def known_states(
    cut: ChunkCut, tables: Sequence[Table], offers: States, local_tokens: int
) -> dict[tuple[int, int], int]:
    """The recurrent states that the tables still hold: those offered, and the one that was resumed from.

    An offer is good for its own step; later on the block counts while it stands in the table.
    """
    states: dict[tuple[int, int], int] = {}
    for group in (each.group for each in cut.groups if each.group.is_recurrent):
        index, span, table = group.engine_index, group.span_tokens, tables[group.engine_index]
        offered = {tokens: block for (of, tokens), block in offers.items() if of == index}
        for num_tokens in {*offered, local_tokens} - {0}:
            position, rest = divmod(num_tokens, span)
            block = table[position - 1] if 0 < position <= len(table) and not rest else NULL_BLOCK
            if block != NULL_BLOCK and offered.get(num_tokens, block) == block:
                states[index, num_tokens] = block
    return states


def _blocks_to_load(group: GroupCut, table: Table, start: int, end: int) -> range:
    span = group.group.span_tokens
    if start % span or end % span or end // span > len(table):
        raise PlanError(
            f"the engine has {len(table)} blocks of {span} tokens for the tokens {start} to {end}"
        )
    wanted = range(max(start // span, group.group.first_needed_block(end)), end // span)
    if any(table[block] == NULL_BLOCK for block in wanted):
        raise PlanError(f"the engine has no block for some of the tokens {start} to {end}")
    return wanted


def _is_complete(group: GroupCut, table: Table, chunk: int) -> bool:
    blocks = group.object_blocks(chunk)
    if blocks.stop > len(table):
        return False
    if group.group.is_local:
        # Nobody loads the blocks that no boundary needs: the null block's bytes stand in for them.
        return table[blocks[-1]] != NULL_BLOCK
    return all(table[block] != NULL_BLOCK for block in blocks)


def _state_rows(
    group: GroupCut, chunk_size: int, chunks: range, states: States
) -> dict[int, tuple[int, ...]]:
    index = group.group.engine_index
    boundaries = {chunk: (index, (chunk + 1) * chunk_size) for chunk in chunks}
    return {chunk: (states[where],) for chunk, where in boundaries.items() if where in states}


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
