"""Recurrent state at the ends of chunks: asking the engine to keep it, and knowing in which blocks it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvwire.vllm.layout import NULL_BLOCK
from kvwire.vllm.plan import tokens_to_ask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.vllm.layout import ChunkCut
    from kvwire.vllm.tracker import RequestTracker


def keep_state(request: Any, cut: ChunkCut, start: int) -> None:
    """Have the engine, which resumes at `start`, stop where a chunk ends and keep its recurrent state there.

    By itself it does so at its last block, and at the end of a prefix that it has seen before, which it marks
    in the request. The mark goes to where a chunk ends before it; without any, to where the last one does.
    """
    mark = getattr(request, "shared_prefix_boundary", None)
    if mark is None or not cut.has_states_inside_chunks:
        return
    seen = mark // cut.chunk_size * cut.chunk_size
    request.shared_prefix_boundary = seen if seen > start else tokens_to_ask(cut, request.num_tokens)


def note_states(tracker: RequestTracker, cut: ChunkCut, scheduler_output: Any, num_new: int) -> None:
    """Remember the states that a step leaves behind at ends of chunks."""
    if not cut.layout.has_states:
        return
    request_id = tracker.request_id
    blocks = scheduler_output.kv_connector_block_state
    tracker.offered(blocks.boundary_state_offloads.get(request_id, ()), cut.chunk_size)
    end = int(tracker.request.num_computed_tokens) + num_new
    drafts = scheduler_output.scheduled_spec_decode_tokens.get(request_id)
    is_decode = end > tracker.request.num_prompt_tokens and not drafts
    if tracker.params.save_decode and is_decode and end % cut.chunk_size == 0:
        tracker.offered(_states_at(cut, blocks.get_block_ids(request_id), end), cut.chunk_size)


def _states_at(cut: ChunkCut, tables: Any, num_tokens: int) -> Iterator[tuple[int, int, int]]:
    # The engine offers no states of generated tokens; where a step ends, its last block holds the state.
    for group in (each.group for each in cut.groups if each.group.is_recurrent):
        table, position = tables[group.engine_index], num_tokens // group.span_tokens
        if 0 < position <= len(table) and table[position - 1] != NULL_BLOCK:
            yield group.engine_index, table[position - 1], num_tokens
