from __future__ import annotations

import pytest

from support.fake_engine import BLOCK, CHUNK, Blocks, FakeLookups, Request, group, scheduler_side, step_output

STATE, FULL = 0, 1


@pytest.fixture
def lookups():
    return FakeLookups()


def side_with_states(lookups, **options):
    return scheduler_side(lookups, group(STATE, state=True), group(FULL), **options)


def admitted(side, lookups, request, hit=0):
    lookups.hits[request.request_id] = hit
    side.matched_tokens(request, 0)
    return side.matched_tokens(request, 0)


def full_table(num_tokens):
    return list(range(100, 100 + -(-num_tokens // BLOCK)))


def step(side, request, num_new, states=(), table=()):
    tables = {request.request_id: [list(table), full_table(request.num_computed_tokens + num_new)]}
    offers = {request.request_id: list(states)}
    stores = side.step(step_output({request.request_id: num_new}, tables=tables, states=offers)).stores
    request.num_computed_tokens += num_new
    return {
        (each.group_index, each.first_chunk + row): block
        for job in stores
        for each in job.plan.groups
        if each.group_index == STATE
        for row, block in enumerate(each.block_ids)
    }


def test_a_state_is_stored_when_the_engine_offers_it(lookups):
    side, request = side_with_states(lookups), Request("r", range(200))
    admitted(side, lookups, request)
    assert step(side, request, 192, [(STATE, 7, 192)], [0, 0, 0, 0, 0, 7]) == {(STATE, 2): 7}
    assert step(side, request, 8, [], [0, 0, 0, 0, 0, 7, 8]) == {}


def test_a_state_inside_a_chunk_is_of_no_use(lookups):
    side, request = side_with_states(lookups), Request("r", range(200))
    admitted(side, lookups, request)
    assert step(side, request, 96, [(STATE, 7, 96)], [0, 0, 7]) == {}


def test_a_block_that_has_moved_on_is_not_stored(lookups):
    side, request = side_with_states(lookups), Request("r", range(200))
    admitted(side, lookups, request)
    lookups.is_healthy = False
    assert step(side, request, 128, [(STATE, 7, 128)], [0, 0, 0, 7]) == {}
    lookups.is_healthy = True
    assert step(side, request, 72, [], [0, 0, 0, 0, 0, 0, 8]) == {}


@pytest.mark.parametrize(("save_decode", "stored"), [(True, {(STATE, 1): 7}), (False, {})])
def test_the_state_after_generated_tokens(save_decode, stored, lookups):
    side, request = side_with_states(lookups, save_decode=save_decode), Request("r", range(100))
    admitted(side, lookups, request)
    step(side, request, 100, [(STATE, 5, 96)], [0, 0, 5, 7])
    request.all_token_ids += range(28)
    request.num_computed_tokens = 127
    assert step(side, request, 1, [], [0, 0, 0, 7]) == {}
    request.all_token_ids += [1]
    assert step(side, request, 1, [], [0, 0, 0, 7, 8]) == stored


def test_drafts_may_be_taken_back(lookups):
    side, request = side_with_states(lookups, save_decode=True), Request("r", range(100))
    admitted(side, lookups, request)
    step(side, request, 100, [], [0, 0, 0, 7])
    request.all_token_ids += range(24)
    request.num_computed_tokens = 124
    tables = {"r": [[0, 0, 0, 7], full_table(128)]}
    output = step_output({"r": 4}, tables=tables)
    output.scheduled_spec_decode_tokens = {"r": [1, 2, 3]}
    side.step(output)
    request.num_computed_tokens = 128
    request.all_token_ids += range(5)
    assert step(side, request, 1, [], [0, 0, 0, 7, 8]) == {}


def test_the_state_that_the_engine_resumes_from_is_stored(lookups):
    """Its own prefix cache has more than the server."""
    side, request = side_with_states(lookups), Request("r", range(200))
    lookups.hits["r"] = 0
    side.matched_tokens(request, 128)
    assert side.matched_tokens(request, 128) == 0
    side.allocated(request, Blocks([0, 0, 0, 7, 0, 0, 8], full_table(200)), 0)
    request.num_computed_tokens = 128
    assert step(side, request, 72, [], [0, 0, 0, 7, 0, 0, 8]) == {(STATE, 1): 7}


class TestWhereTheEngineStops:
    def stop(self, side, length, mark=0, local=0):
        request = Request(str(length), range(length), shared_prefix_boundary=mark)
        side.matched_tokens(request, local)
        side.matched_tokens(request, local)
        return request.shared_prefix_boundary

    def test_at_the_end_of_the_last_chunk_that_leaves_a_token(self, lookups):
        side = side_with_states(lookups)
        lookups.hits = {str(3 * CHUNK): 0, str(3 * CHUNK + 1): 0}
        assert self.stop(side, 3 * CHUNK) == 2 * CHUNK
        assert self.stop(side, 3 * CHUNK + 1) == 3 * CHUNK
        assert self.stop(side, CHUNK) == 0

    @pytest.mark.parametrize(("mark", "stop"), [(160, 128), (128, 128), (96, 256), (32, 256)])
    def test_at_the_chunk_before_a_mark_of_the_engine(self, mark, stop, lookups):
        """Unless a load brings it there: 64 tokens are found."""
        lookups.hits["300"] = 64
        assert self.stop(side_with_states(lookups), 300, mark) == stop

    def test_at_nothing_that_the_engine_has(self, lookups):
        lookups.hits["300"] = 0
        assert self.stop(side_with_states(lookups), 300, mark=160, local=128) == 256

    @pytest.mark.parametrize(
        ("groups", "options"),
        [
            ([group(STATE, span=CHUNK, state=True), group(FULL)], {}),
            ([group(0, window=64), group(1)], {}),
            ([group(STATE, state=True), group(FULL)], {"stores": False}),
        ],
    )
    def test_not_without_a_use(self, groups, options, lookups):
        lookups.hits["200"] = 0
        assert self.stop(scheduler_side(lookups, *groups, **options), 200) == 0
        assert self.stop(scheduler_side(lookups, *groups, **options), 200, mark=96) == 96
