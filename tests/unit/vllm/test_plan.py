from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvwire.client.jobs import NOT_WANTED
from kvwire.client.layout import GroupKind
from kvwire.keys import final_chunk_size
from kvwire.vllm.layout import NULL_BLOCK, ChunkCut
from kvwire.vllm.plan import (
    PlanError,
    external_tokens,
    known_states,
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

    def test_chunked_local_attention_reads_back_to_the_last_multiple_of_its_size(self):
        chunks = cut(group(0, window=128, local=True), chunk_size=64)
        assert not load_plan(chunks, [[0, 0, 0, 0, 5]], 0, 128).groups
        plan = load_plan(chunks, [[0, 0, 0, 0, 5, 6]], 0, 192)
        assert plan.block_ids == {5, 6}
        with pytest.raises(PlanError):
            load_plan(chunks, [[0, 0, 0, 0, 0, 6]], 0, 192)

    def test_recurrent_state_is_loaded_where_the_engine_resumes(self):
        chunks = cut(group(0, state=True), group(1))
        state, full = load_plan(chunks, [[0, 0, 0, 9, 10], [1, 2, 3, 4, 5]], 64, 128).groups
        assert (state.first_chunk, state.chunk_count, state.block_ids) == (1, 1, (9,))
        assert full.block_ids == (3, 4)

    def test_no_block_for_the_state_is_an_error(self):
        with pytest.raises(PlanError):
            load_plan(cut(group(0, state=True), group(1)), [[0, 0, 9, 0], [1, 2, 3, 4]], 0, 128)

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
        chunks = cut(group(0, window=128, local=True), chunk_size=64)
        assert only(store_plan(chunks, [[0, 0, 0, 4]], range(1, 2))).block_ids == (0, 4)
        assert not store_plan(chunks, [[0, 0, 0, 0]], range(1, 2)).groups


class TestStates:
    """Two blocks in a chunk: of states only those after whole chunks count."""

    def test_states_that_exist_are_stored_and_no_others(self):
        chunks = cut(group(0, state=True), group(1))
        tables = [[0, 0, 0, 9, 10, 0], [1, 2, 3, 4, 5, 6]]
        state, full = store_plan(chunks, tables, range(3), {(0, 128): 9}).groups
        assert (state.first_chunk, state.chunk_count, state.block_ids) == (1, 1, (9,))
        assert full.chunk_count == 3
        (full,) = store_plan(chunks, tables, range(3)).groups
        assert full.group_index == 1

    def test_an_offer_counts_while_its_block_stands_in_the_table(self):
        chunks = cut(group(0, state=True), group(1))
        offers = {(0, 64): 7, (0, 128): 9}
        assert known_states(chunks, [[0, 7, 0, 9], []], offers, 0) == offers
        assert known_states(chunks, [[0, 7, 0, 8], []], offers, 0) == {(0, 64): 7}
        assert known_states(chunks, [[0, 7, 0, 0, 9], []], offers, 0) == {(0, 64): 7}
        assert known_states(chunks, [[], []], offers, 128) == {}

    def test_the_state_that_the_engine_resumed_from_counts_too(self):
        chunks = cut(group(0, state=True), group(1, state=True))
        assert known_states(chunks, [[0, 7, 8], [0, 0, 9]], {}, 64) == {(0, 64): 7}
        assert known_states(chunks, [[0, 7, 8], [0, 6, 9]], {}, 50) == {}

    def test_bl25_a_full_hit_falls_back_to_the_chunk_before(self):
        chunks = cut(group(0, span=48), group(1, span=32, state=True), chunk_size=96)
        assert [tokens_to_ask(chunks, length) for length in (384, 385)] == [288, 384]
        assert [resume_point(chunks, 384, length) for length in (384, 385)] == [0, 384]
        attention = cut(group(0, span=48), chunk_size=96)
        assert tokens_to_ask(attention, 384) == 384
        assert resume_point(attention, 384, 384) == 336

    def test_bl28_blocks_are_counted_by_what_they_span(self):
        """Blocks of 16 under decode context parallelism of 2: attention's hold 32 tokens, a state's 16."""
        chunks = cut(group(0, span=32), group(1, span=16, state=True), chunk_size=32)
        assert chunks.layout.alignment == 32
        full, state = load_plan(chunks, [[1, 2], [0, 8, 9]], 0, 32).groups
        assert (full.block_ids, state.block_ids) == ((1,), (8,))


@pytest.mark.parametrize(
    ("spans", "minimum", "alignment", "final"),
    [
        ((256,), 256, 256, 256),
        ((544,), 256, 544, 544),
        ((544,), 600, 544, 1088),
        ((32, 48), 256, 96, 288),
    ],
)
def test_the_final_chunk_size(spans, minimum, alignment, final):
    """The examples of the negotiation."""
    found = layout(*(group(index, span=span) for index, span in enumerate(spans)))
    assert found.alignment == alignment
    assert final_chunk_size(minimum, alignment) == final
    assert [each.blocks_per_chunk for each in ChunkCut.make(found, final).groups] == [
        final // span for span in spans
    ]


@pytest.mark.parametrize(("size", "chunk_size"), [(128, 64), (64, 128), (192, 64), (96, 64), (64, 64)])
def test_the_window_of_chunked_local_attention_is_what_a_chunk_boundary_reads(size, chunk_size):
    each = group(0, window=size, local=True, span=32)
    boundaries = range(chunk_size, 10 * size, chunk_size)
    most = max(end // 32 - each.first_needed_block(end) for end in boundaries)
    assert each.window_at(chunk_size) == max(end % size for end in boundaries) + 1
    assert (each.window_at(chunk_size) - 1 + 31) // 32 == most


@st.composite
def prompts(draw):
    """Groups, a chunk size, a prompt, where its prefill is cut, and what the reader holds."""
    groups = [draw(groups_of(index)) for index in range(draw(st.integers(1, 3)))]
    chunk_size = draw(st.sampled_from([32, 64, 96]))
    num_tokens = draw(st.integers(1, 400))
    cuts = draw(st.sets(st.integers(1, num_tokens), max_size=4))
    cuts |= {num_tokens, (num_tokens - 1) // chunk_size * chunk_size} - {0}
    return groups, chunk_size, num_tokens, sorted(cuts), draw(st.integers(0, num_tokens))


@st.composite
def groups_of(draw, index):
    span = draw(st.sampled_from([8, 16, 32]))
    window = draw(st.sampled_from([0, 9, 16, 40, 100]))
    kinds = ({"window": window}, {"window": max(window, span), "local": True}, {"state": True})
    return group(index, span=span, **draw(st.sampled_from(kinds)))


class Tables:
    """Block tables as the engine keeps them: what no token will read any more becomes the null block."""

    def __init__(self, groups):
        self.groups = groups
        self.tables = [[] for _ in groups]
        self.next = 1

    def grow(self, resume_at, num_tokens):
        """One step, which computes the tokens in between. Returns the states that it leaves behind."""
        states = {}
        for each, table in zip(self.groups, self.tables, strict=True):
            end = -(-num_tokens // each.span_tokens)
            kept = end - 1 if each.is_recurrent else self.skipped(each, resume_at)
            for block in range(min(kept, len(table))):
                table[block] = 0
            while len(table) < end:
                table.append(0 if len(table) < kept else self.next)
                self.next += 1
            if each.is_recurrent and num_tokens % each.span_tokens == 0:
                states[each.engine_index, num_tokens] = table[-1]
        return states

    @staticmethod
    def skipped(each, resume_at):
        if each.is_local:
            return resume_at // each.window_tokens * each.window_tokens // each.span_tokens
        return max(0, resume_at - each.window_tokens + 1) // each.span_tokens if each.is_window else 0


class Stored:
    """What the server has: objects with the blocks that they were made of."""

    def __init__(self, chunks):
        self._chunks = chunks
        self._objects = {}

    def put(self, plan):
        for each in plan.groups:
            for chunk in range(each.first_chunk, each.first_chunk + each.chunk_count):
                self._objects[each.group_index, chunk] = each.blocks_of(chunk)

    def block(self, group_index, position):
        cut = self._chunks.groups[group_index]
        chunk = position // cut.blocks_per_chunk
        return self._objects[group_index, chunk][position - cut.object_blocks(chunk).start]

    def hit(self, asked):
        """The longest boundary of which every group has the chunks that its kind needs."""
        boundary = asked // self._chunks.chunk_size
        while not all(self._serves(index, boundary) for index in range(len(self._chunks.groups))):
            boundary -= 1
        return boundary * self._chunks.chunk_size

    def _serves(self, index, boundary):
        each = self._chunks.layout.kv_layout(self._chunks.chunk_size).groups[index]
        widths = {
            GroupKind.FULL_ATTENTION: boundary,
            GroupKind.RECURRENT: 1,
            GroupKind.SLIDING_WINDOW: max(1, -(-(each.window_tokens - 1) // self._chunks.chunk_size)),
        }
        needed = range(max(0, boundary - widths[each.kind]), boundary)
        return all((index, chunk) in self._objects for chunk in needed)


@given(prompts())
def test_what_one_engine_stores_another_one_resumes_from(prompt):
    groups, chunk_size, num_tokens, cuts, held = prompt
    chunks = cut(*groups, chunk_size=chunk_size)
    alignment = chunks.layout.alignment
    assume(chunk_size % alignment == 0)
    stored = Stored(chunks)
    writer, done, next_chunk = Tables(groups), 0, 0
    for end in cuts:
        states = known_states(chunks, writer.tables, writer.grow(done, end), 0)
        stored.put(store_plan(chunks, writer.tables, range(next_chunk, end // chunk_size), states))
        done, next_chunk = end, end // chunk_size

    local = held // alignment * alignment
    asked = tokens_to_ask(chunks, num_tokens)
    hit = stored.hit(asked)
    # The prefill is cut where the last chunk ends, so there is a state.
    assert hit == asked
    promised = external_tokens(chunks, hit, num_tokens, local)
    if promised == 0:
        return
    end = local + promised
    assert end < num_tokens
    assert end % alignment == 0
    reader = Tables(groups)
    reader.grow(end, end)
    loaded = {}
    for each in load_plan(chunks, reader.tables, local, end).groups:
        rows = chunks.groups[each.group_index].rows
        for row, block in enumerate(each.block_ids):
            chunk = each.first_chunk + row // rows
            position = chunks.groups[each.group_index].object_blocks(chunk)[row % rows]
            if block != NOT_WANTED:
                assert reader.tables[each.group_index][position] == block
                loaded[each.group_index, position] = stored.block(each.group_index, position)
    assert NULL_BLOCK not in loaded.values()
    for index, each in enumerate(groups):
        first = each.first_needed_block(end)
        needed = range(
            first if each.is_recurrent else max(local // each.span_tokens, first), end // each.span_tokens
        )
        assert {position for group_index, position in loaded if group_index == index} == set(needed)
