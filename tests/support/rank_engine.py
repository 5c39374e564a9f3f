"""An engine of two ranks without an engine: its adapters as the connector puts them together, over numpy."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np

from kvwire.client.jobs import GroupBlocks
from kvwire.client.layout import GroupKind
from kvwire.keys import Namespace
from kvwire.vllm.adapters import WorkerAdapter
from kvwire.vllm.assembly import to_op
from kvwire.vllm.layout import CacheGroup, EngineLayout
from kvwire.vllm.metadata import Job, Prompt
from kvwire.vllm.plan import BlockPlan
from kvwire.vllm.servers import SpreadSchedulerAdapter, spread

BLOCKS, BLOCK, CHUNK, PAGE = 64, 16, 64, 4096
PER_CHUNK = CHUNK // BLOCK
SPACE = Namespace("m", layout_fingerprint=b"two ranks")
DEADLINES = {"Ping": 0.3, "Lookup": 1.0, "NegotiateChunkSize": 1.0, "RegisterKvCache": 2.0, "Attach": 1.0}


def engine_layout(window=0):
    groups = [CacheGroup(0, GroupKind.FULL_ATTENTION, BLOCK, ("l0", "l1"), (PAGE, PAGE))]
    if window:
        kind = GroupKind.SLIDING_WINDOW
        groups.append(CacheGroup(1, kind, BLOCK, ("w0",), (PAGE,), window_tokens=window))
    return EngineLayout(tuple(groups), len(groups), BLOCKS, 2, block_major=False)


def wait_until(check, seconds=10.0):
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until
        time.sleep(0.02)


class RankEngine:
    """`found`, `store` and `load` wait for their end. A job names chunks of one session."""

    def __init__(self, addresses, layout, name="engine", **options):
        self.layout = layout
        settings = {
            "engine_id": name,
            "heartbeat_interval": 0.3,
            "deadlines": DEADLINES,
            "alignment": layout.alignment,
            **options,
        }
        self.shares = spread(addresses, 2)
        self.scheduler = SpreadSchedulerAdapter(
            self.shares,
            "m",
            BLOCK,
            namespace=SPACE,
            layout=layout.kv_layout,
            client_name="scheduler",
            **settings,
        )
        self.ranks = [self._rank(rank, settings) for rank in range(2)]

    def _rank(self, rank, settings):
        share = next(share for share in self.shares if rank in share.ranks)
        random = np.random.default_rng(rank)
        kv = [
            [random.integers(0, 255, (BLOCKS, PAGE), dtype=np.uint8) for _ in group.layer_names]
            for group in self.layout.groups
        ]
        worker = WorkerAdapter(
            share.address,
            None,
            "m",
            len(share.ranks),
            share.local_rank(rank),
            BLOCK,
            namespace=share.namespace(SPACE),
            layout=share.layout(self.layout.kv_layout),
            client_name=f"worker {rank}",
            **settings,
        )
        worker.register_kv_caches(kv)
        return SimpleNamespace(worker=worker, share=share, kv=kv)

    def found(self, session, tokens):
        self.scheduler.maybe_submit_lookup_request(session, tokens=tokens)
        wait_until(lambda: self.scheduler.check_lookup_result(session) is not None)
        return self.scheduler.check_lookup_result(session)

    def job(self, session, chunks, first_block=0, groups=None, keys=()):
        plan = BlockPlan(
            tuple(
                GroupBlocks(index, chunks.start, len(chunks), tuple(self._ids(index, chunks, first_block)))
                for index in (groups or range(len(self.layout.groups)))
            )
        )
        return Job(session, Prompt(session, SPACE if keys else None, keys), plan)

    def _ids(self, index, chunks, first_block):
        rows = self.layout.kv_layout(CHUNK).groups[index].blocks_per_object
        for chunk in chunks:
            stop = first_block + (chunk + 1) * PER_CHUNK
            yield from range(stop - rows, stop)

    def store(self, job, ranks=(0, 1)):
        return self._run(job, ranks, "submit_store_request")

    def load(self, job, ranks=(0, 1)):
        return self._run(job, ranks, "submit_retrieve_request")

    def _run(self, job, ranks, name):
        parts = [self.ranks[rank] for rank in ranks]
        transfers = [getattr(part.worker, name)(job.request_id, to_op(job, part.share)) for part in parts]
        assert all(each.wait(15) for each in transfers)
        return transfers

    def close(self):
        self.scheduler.shutdown()
        for rank in self.ranks:
            rank.worker.shutdown()
