"""Block ids in what the engine's scheduler says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvwire.vllm.layout import EngineLayout


def given_out(scheduler_output: Any, layout: EngineLayout) -> frozenset[int]:
    """The blocks that requests write to from this step on: their new ones, not those that they share."""
    return frozenset(_given_out(scheduler_output, layout)).union(_prepared(scheduler_output))


def _given_out(scheduler_output: Any, layout: EngineLayout) -> Iterator[int]:
    spans = {group.engine_index: group.span_tokens for group in layout.groups}
    for new in scheduler_output.scheduled_new_reqs:
        yield from _behind(new.block_ids, new.num_computed_tokens, spans)
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, ids, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if ids is not None and request_id in cached.resumed_req_ids:
            yield from _behind(ids, computed, spans)
        elif ids is not None:
            for group in ids:
                yield from group


def _prepared(scheduler_output: Any) -> Iterator[int]:
    """Blocks that the workers zero or copy another one to, which may be in no table that a step names."""
    yield from scheduler_output.new_block_ids_to_zero or ()
    for _, target in scheduler_output.kv_cache_block_copies or ():
        yield target


def _behind(tables: Sequence[Sequence[int]], num_computed: int, spans: dict[int, int]) -> Iterator[int]:
    for index, table in enumerate(tables):
        span = spans.get(index)
        yield from table if span is None else table[num_computed // span :]
