"""Chunks that are stored when the engine is about to drop them: not before, not twice, never too late."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvwire.client.jobs import GroupBlocks
from kvwire.keys import chunk_keys, root
from kvwire.vllm.lazy import PATIENCE_S, LazyStores, horizon
from kvwire.vllm.metadata import WorkerReport
from kvwire.vllm.plan import BlockPlan
from kvwire.vllm.requests import TrackerFactory
from support.fake_engine import (
    CHUNK,
    NAMESPACE,
    Blocks,
    FakeLookups,
    Request,
    scheduler_side,
    step_output,
    worker_output,
)

BLOCKS = 40


class Pool:
    """vLLM's BlockPool: `free` is its queue, the next block to be given out first."""

    enable_caching = True

    def __init__(self, num_blocks=BLOCKS):
        self.blocks = [SimpleNamespace(block_id=n, ref_cnt=0, block_hash=None) for n in range(num_blocks)]
        self.num_gpu_blocks = num_blocks
        self.free = []
        self.free_block_queue = SimpleNamespace(iter_blocks_after=lambda cursor: iter(self.free))

    def computed(self, *numbers):
        """A request has filled these blocks, and is over: they are the last to be given out."""
        for number in numbers:
            self.blocks[number].block_hash = f"hash {number}"
        self.free += [self.blocks[number] for number in reversed(numbers)]

    def give_out(self, count):
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            block.block_hash, block.ref_cnt = None, 1

    def touch(self, blocks):
        for block in blocks:
            if block.ref_cnt == 0:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if block.ref_cnt == 0:
                self.free.append(block)


def plan(*chunks, first=0):
    return BlockPlan((GroupBlocks(0, first, len(chunks), tuple(b for chunk in chunks for b in chunk)),))


def tracker(length=200, **fields):
    return TrackerFactory(NAMESPACE)(Request("r", range(length), **fields))


def lazy(pool, reach, world_size=1, **options):
    return LazyStores(pool, reach, world_size, **options)


class TestLazyStores:
    def test_a_chunk_is_stored_when_its_tail_comes_into_reach(self):
        pool = Pool()
        pool.computed(9, 10, 11, 12)
        pool.computed(1, 2, 3, 4)
        stores = lazy(pool, 5)
        assert not stores.keep(tracker(), plan((1, 2), (3, 4)), CHUNK).groups
        (job,) = stores.due()
        assert job.plan == plan((3, 4), first=1)
        assert job.prompt.keys == tuple(chunk_keys(root(NAMESPACE, CHUNK), list(range(128)), CHUNK)[1:])
        assert job.prompt.namespace == NAMESPACE
        assert [pool.blocks[n].ref_cnt for n in (1, 2, 3, 4)] == [0, 0, 1, 1]
        # The held blocks have left the queue, so that the head of the prompt is in reach now.
        (job,) = stores.due()
        assert job.plan == plan((1, 2))
        assert not stores.due()

    def test_out_of_reach_nothing_happens(self):
        pool = Pool()
        pool.computed(9, 10, 11, 12)
        pool.computed(1, 2)
        stores = lazy(pool, 4)
        stores.keep(tracker(), plan((1, 2)), CHUNK)
        assert not stores.due()
        assert not stores.frees_soon

    def test_the_engine_waits_for_a_copy_and_not_for_a_server_that_hangs(self):
        now = [0.0]
        pool = Pool()
        pool.computed(1, 2)
        stores = lazy(pool, 8, clock=lambda: now[0])
        stores.keep(tracker(), plan((1, 2)), CHUNK)
        stores.due()
        now[0] = PATIENCE_S - 0.1
        assert stores.frees_soon
        now[0] = PATIENCE_S
        assert not stores.frees_soon
        assert not pool.free

    def test_blocks_are_free_again_when_all_ranks_have_ended(self):
        pool = Pool()
        pool.computed(1, 2)
        stores = lazy(pool, 4, world_size=2)
        stores.keep(tracker(), plan((1, 2)), CHUNK)
        (job,) = stores.due()
        stores.ended(job.request_id, 1)
        stores.ended("another", 1)
        assert stores.frees_soon
        assert not pool.free
        stores.ended(job.request_id, 1)
        assert not stores.frees_soon
        assert [block.block_id for block in pool.free] == [2, 1]
        # Once is enough, also when a later request has the same blocks.
        stores.keep(tracker(), plan((1, 2)), CHUNK)
        assert not stores.due()

    def test_what_has_another_owner_is_never_stored(self):
        pool = Pool()
        pool.computed(1, 2)
        stores = lazy(pool, 4)
        stores.keep(tracker(), plan((1, 2)), CHUNK)
        pool.give_out(1)
        assert not stores.due()
        pool.blocks[2].ref_cnt = 0
        pool.blocks[2].block_hash = "of something else"
        pool.free.append(pool.blocks[2])
        assert not stores.due()
        assert not stores._by_block

    def test_what_is_in_use_again_is_held_on_its_own_account(self):
        pool = Pool()
        pool.computed(1, 2)
        stores = lazy(pool, 4)
        stores.keep(tracker(), plan((1, 2)), CHUNK)
        (job,) = stores.due()
        pool.touch([pool.blocks[1], pool.blocks[2]])
        stores.ended(job.request_id, 1)
        assert [pool.blocks[n].ref_cnt for n in (1, 2)] == [1, 1]
        assert not pool.free

    def test_blocks_that_the_engine_does_not_cache_are_left_over(self):
        pool = Pool()
        pool.computed(1, 2)
        left = lazy(pool, 4).keep(tracker(), plan((1, 2), (3, 4)), CHUNK)
        assert left == BlockPlan((GroupBlocks(0, 1, 1, (3, 4)),))

    def test_only_a_quarter_of_the_blocks_is_held(self):
        pool = Pool()
        pool.computed(*range(1, 21))
        stores = lazy(pool, BLOCKS)
        stores.keep(tracker(1000), plan(*((n, n + 1) for n in range(1, 21, 2))), CHUNK)
        jobs = stores.due()
        assert sum(len(job.plan.block_ids) for job in jobs) == BLOCKS // 4
        assert not stores.due()
        for job in jobs:
            stores.ended(job.request_id, 1)
        assert stores.due()

    def test_after_a_reset_nothing_of_before_is_stored(self):
        pool = Pool()
        pool.computed(1, 2)
        stores = lazy(pool, 4)
        stores.keep(tracker(), plan((1, 2)), CHUNK)
        stores.forget()
        assert not stores.due()

    def test_what_is_remembered_is_bounded_by_the_blocks(self):
        pool = Pool(6)
        stores = lazy(pool, 3)
        for number in range(50):
            pool.free.clear()
            pool.computed(1, 2, 3, 4)
            for block in pool.blocks:
                block.block_hash = f"{number} {block.block_id}"
            stores.keep(tracker(200 + number), plan((1, 2), (3, 4)), CHUNK)
        assert len(stores._by_block) == 4


def test_the_horizon_is_two_steps():
    assert horizon(512, 8, [32]) == 2 * (16 + 8)
    assert horizon(500, 8, [32, 64]) == 2 * (16 + 8 + 8 + 8)


@pytest.fixture
def side():
    found = scheduler_side(FakeLookups())
    found.lazy = lazy(Pool(), 8)
    return found


def test_the_schedulers_side_holds_no_request_for_them(side):
    pool = side.lazy._pool
    request = Request("r", range(200))
    table = [1, 2, 3, 4, 5, 6, 7]
    side.matched_tokens(request, 0)
    side._lookups.hits["r"] = 0
    side.matched_tokens(request, 0)
    side.allocated(request, Blocks(table), 0)
    for number in table:
        pool.blocks[number].block_hash = f"hash {number}"
    assert not side.step(step_output({"r": 200}, tables={"r": [table]})).stores
    assert side.tally.take().get("stored_tokens") is None
    assert not side.finished(request)
    pool.computed(*table)
    stores = side.step(step_output()).stores
    assert [job.plan.chunks for job in stores] == [range(2, 3), range(1, 2), range(1)]
    assert side.tally.take()["stored_tokens"] == 3 * CHUNK
    assert not side.reset(1.0)
    side.worker_output(worker_output(report=WorkerReport({job.request_id: 1 for job in stores})))
    assert not side.lazy.frees_soon
    assert side.reset(1.0)
