from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.client.jobs import NOT_WANTED
from kvwire.vllm.layout import ChunkCut
from kvwire.vllm.plan import (
    PlanError,
    external_tokens,
    load_plan,
    resume_point,
    store_plan,
    tokens_to_ask,
)
from support.fake_engine import group, layout


def cut(*groups, chunk_size=64):
    return ChunkCut.make(layout(*groups), chunk_size)


def only(plan):
    (blocks,) = plan.groups
    return blocks


class TestPromise:
    @pytest.mark.parametrize(
        ("num_tokens", "computed", "most"),
        [(256, 0, 255), (512, 0, 511), (513, 0, 512), (1, 0, 0), (512, 511, 0), (512, 512, 0)],
    )
    def test_bl10_a_full_hit_leaves_a_token_to_compute(self, num_tokens, computed, most):
        chunks = cut(group(span=16), chunk_size=256)
        hit = tokens_to_ask(chunks, num_tokens)
        promised = external_tokens(chunks, hit, num_tokens, computed)
        assert 0 <= promised <= most
        assert hit == 0 or computed or promised >= hit - 16

    def test_bl11_a_full_hit_ends_after_whole_blocks(self):
        chunks = cut(group(span=16))
        assert resume_point(chunks, 128, 128) == 112
        assert resume_point(chunks, 128, 129) == 128
        assert resume_point(chunks, 64, 128) == 64

    def test_a_window_group_is_resumed_at_chunk_boundaries_only(self):
        chunks = cut(group(0), group(1, window=64))
        assert tokens_to_ask(chunks, 128) == 64
        assert tokens_to_ask(chunks, 129) == 128
        assert resume_point(chunks, 128, 129) == 128
        assert resume_point(chunks, 128, 128) == 0

    def test_a_prompt_shorter_than_a_chunk_asks_for_nothing(self):
        assert tokens_to_ask(cut(), 63) == 0
        assert tokens_to_ask(cut(), 0) == 0

    def test_what_the_engine_holds_is_not_promised(self):
        assert external_tokens(cut(), 128, 200, 160) == 0
        assert external_tokens(cut(), 128, 200, 96) == 32


class TestLoad:
    def test_bl11_tokens_written_are_tokens_promised(self):
        chunks = cut(group(span=16))
        promised = external_tokens(chunks, 128, 128, 0)
        plan = load_plan(chunks, [[11, 12, 13, 14, 15, 16, 17, 18]], 0, promised)
        assert only(plan).block_ids == (11, 12, 13, 14, 15, 16, 17, NOT_WANTED)
        assert len(plan.block_ids) * 16 == promised

    def test_bl11_a_promise_inside_a_block_is_refused(self):
        with pytest.raises(PlanError):
            load_plan(cut(group(span=16)), [[1, 2, 3, 4]], 0, 40)

    def test_bl23_blocks_of_the_engines_own_prefix_are_not_written(self):
        plan = load_plan(cut(group(span=16)), [[1, 2, 3, 4, 5]], 48, 64)
        assert only(plan).block_ids == (NOT_WANTED, NOT_WANTED, NOT_WANTED, 4)
        assert plan.block_ids == {4}

    def test_chunks_that_the_engine_holds_are_left_out(self):
        plan = load_plan(cut(), [[1, 2, 3, 4, 5, 6]], 64, 192)
        assert (only(plan).first_chunk, only(plan).chunk_count) == (1, 2)
        assert plan.chunks == range(1, 3)

    def test_a_window_loads_only_what_resuming_reads(self):
        chunks = cut(group(0), group(1, window=64))
        plan = load_plan(chunks, [[1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 21, 22, 23]], 0, 192)
        full, window = plan.groups
        assert full.block_ids == (1, 2, 3, 4, 5, 6)
        assert (window.group_index, window.first_chunk, window.chunk_count) == (1, 2, 1)
        assert window.block_ids == (21, 22)

    def test_a_window_longer_than_a_chunk_spans_objects(self):
        chunks = cut(group(0, window=100))
        plan = load_plan(chunks, [[0, 0, 31, 32, 33, 34, 35]], 0, 192)
        assert (only(plan).first_chunk, only(plan).block_ids) == (1, (31, 32, 33, 34))
        plan = load_plan(chunks, [[0, 0, 31, 32, 33, 34, 35]], 96, 192)
        assert (only(plan).first_chunk, only(plan).block_ids) == (1, (NOT_WANTED, 32, 33, 34))

    def test_holes_of_chunked_local_attention_are_left_out(self):
        chunks = cut(group(0, window=128, holes=True), chunk_size=64)
        assert not load_plan(chunks, [[0, 0, 0, 0, 5]], 0, 128).groups
        plan = load_plan(chunks, [[0, 0, 0, 0, 5, 6]], 0, 192)
        assert plan.block_ids == {5, 6}

    @pytest.mark.parametrize("table", [[1, 2], [1, 2, 0, 4]])
    def test_a_table_without_the_blocks_is_an_error(self, table):
        with pytest.raises(PlanError):
            load_plan(cut(), [table], 0, 128)


class TestStore:
    def test_whole_chunks(self):
        plan = store_plan(cut(), [[1, 2, 3, 4, 5]], range(2))
        assert only(plan).block_ids == (1, 2, 3, 4)
        assert (only(plan).first_chunk, only(plan).chunk_count) == (0, 2)

    def test_a_short_window_stores_the_end_of_each_chunk(self):
        chunks = cut(group(0), group(1, window=33), chunk_size=128)
        full, window = store_plan(chunks, [list(range(1, 9)), list(range(11, 19))], range(2)).groups
        assert full.block_ids == tuple(range(1, 9))
        assert window.block_ids == (14, 18)

    def test_what_the_engine_has_dropped_is_left_out(self):
        chunks = cut(group(0), group(1, window=64))
        full, window = store_plan(chunks, [[1, 2, 3, 4, 5, 6], [0, 0, 0, 14, 15, 16]], range(3)).groups
        assert full.chunk_count == 3
        assert (window.first_chunk, window.block_ids) == (2, (15, 16))

    def test_gaps_make_two_ranges(self):
        plan = store_plan(cut(group(window=64)), [[1, 2, 0, 0, 5, 6]], range(3))
        assert [(each.first_chunk, each.block_ids) for each in plan.groups] == [(0, (1, 2)), (2, (5, 6))]

    def test_holes_of_chunked_local_attention_are_stored_as_the_null_block(self):
        chunks = cut(group(0, window=128, holes=True), chunk_size=64)
        assert only(store_plan(chunks, [[0, 0, 0, 4]], range(1, 2))).block_ids == (0, 4)
        assert not store_plan(chunks, [[0, 0, 0, 0]], range(1, 2)).groups


@st.composite
def prompts(draw):
    """Groups, a chunk size, a prompt, where its prefill is cut, and what the reader holds."""
    spans = draw(st.lists(st.sampled_from([8, 16, 32]), min_size=1, max_size=3))
    windows = [draw(st.sampled_from([0, 9, 16, 40, 100])) for _ in spans]
    chunk_size = draw(st.sampled_from([32, 64, 96]))
    num_tokens = draw(st.integers(1, 400))
    cuts = sorted(draw(st.sets(st.integers(1, num_tokens), max_size=4)) | {num_tokens})
    groups = [
        group(i, span=span, window=window)
        for i, (span, window) in enumerate(zip(spans, windows, strict=True))
    ]
    return groups, chunk_size, num_tokens, cuts, draw(st.integers(0, num_tokens))


class Tables:
    """Block tables as the engine keeps them: what falls out of a window becomes the null block."""

    def __init__(self, groups):
        self.groups = groups
        self.tables = [[] for _ in groups]
        self.next = 1

    def grow(self, resume_at, num_tokens):
        for each, table in zip(self.groups, self.tables, strict=True):
            skipped = max(0, resume_at - each.window_tokens + 1) // each.span_tokens if each.is_window else 0
            for block in range(min(skipped, len(table))):
                table[block] = 0
            while len(table) < -(-num_tokens // each.span_tokens):
                table.append(0 if len(table) < skipped else self.next)
                self.next += 1


@given(prompts())
def test_what_one_engine_stores_another_one_resumes_from(prompt):
    groups, chunk_size, num_tokens, cuts, held = prompt
    chunks = cut(*groups, chunk_size=chunk_size)
    alignment = chunks.layout.alignment
    stored = {}
    writer, done, next_chunk = Tables(groups), 0, 0
    for end in cuts:
        writer.grow(done, end)
        for each in store_plan(chunks, writer.tables, range(next_chunk, end // chunk_size)).groups:
            rows = chunks.groups[each.group_index].rows
            for row, block in enumerate(each.block_ids):
                chunk = each.first_chunk + row // rows
                position = chunks.groups[each.group_index].object_blocks(chunk)[row % rows]
                assert writer.tables[each.group_index][position] == block
                stored[each.group_index, position] = block
        done, next_chunk = end, end // chunk_size

    local = held // alignment * alignment
    hit = tokens_to_ask(chunks, num_tokens)
    promised = external_tokens(chunks, hit, num_tokens, local)
    if promised == 0:
        return
    end = local + promised
    assert end < num_tokens
    assert end % alignment == 0
    reader = Tables(groups)
    reader.grow(end, end)
    plan = load_plan(chunks, reader.tables, local, end)
    loaded = {}
    for each in plan.groups:
        rows = chunks.groups[each.group_index].rows
        for row, block in enumerate(each.block_ids):
            chunk = each.first_chunk + row // rows
            position = chunks.groups[each.group_index].object_blocks(chunk)[row % rows]
            if block != NOT_WANTED:
                assert reader.tables[each.group_index][position] == block
                loaded[each.group_index, position] = stored[each.group_index, position]
    for index, each in enumerate(groups):
        needed = range(max(local // each.span_tokens, each.first_needed_block(end)), end // each.span_tokens)
        assert {position for group_index, position in loaded if group_index == index} == set(needed)
