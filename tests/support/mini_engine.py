"""The connector's two sides over a real server, under an engine that computes what can be checked.

The KV of a token is a digest of all that it may depend on: the tokens up to it, the images among them, the
adapter, the salt and the rank. So a hit that is wrong by a single token shows in memory.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np

from kvwire.client.layout import GroupKind
from kvwire.vllm.adapters import SchedulerAdapter, WorkerAdapter
from kvwire.vllm.assembly import to_op
from kvwire.vllm.layout import CacheGroup, EngineLayout
from kvwire.vllm.metadata import StepMetadata
from kvwire.vllm.requests import TrackerFactory
from kvwire.vllm.scheduler import SchedulerSide
from kvwire.vllm.servers import Share
from kvwire.vllm.worker import WorkerSide
from support.fake_engine import NAMESPACE, Blocks, Request, step_output, worker_output
from support.waiting import eventually

BLOCK, SLOT_BYTES = 16, 16
PAGE = BLOCK * SLOT_BYTES
SENTINEL = 0xEE


def image(identifier, offset, length):
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


@dataclass
class Ran:
    """One request: what was loaded of it, where its blocks are, and what its load said of failures."""

    request: Request
    external: int
    table: list[int]
    failed: bool = False
    failed_blocks: frozenset[int] = frozenset()


class MiniEngine:
    """`run` takes a request from its arrival to its end. `ranks` are the workers, with their memory `kv`."""

    def __init__(self, address, *, world_size=1, num_blocks=128, store_wait=5.0, **options):
        self.layout = EngineLayout(
            (CacheGroup(0, GroupKind.FULL_ATTENTION, BLOCK, ("l0", "l1"), (PAGE, PAGE)),),
            1,
            num_blocks,
            world_size,
            block_major=False,
        )
        self.free = deque(range(1, num_blocks))
        self._sent: Counter[str] = Counter()
        self._names = (f"request-{number}" for number in itertools.count())
        settings = {
            "engine_id": f"mini-{id(self)}",
            "heartbeat_interval": 0.3,
            "alignment": BLOCK,
            "namespace": NAMESPACE,
            "layout": self.layout.kv_layout,
            **options,
        }
        self.adapter = SchedulerAdapter(address, None, "m", world_size, 0, BLOCK, **settings)
        self.scheduler = SchedulerSide(self.layout, self.adapter, TrackerFactory(NAMESPACE))
        self.ranks = [self._rank(address, rank, store_wait, settings) for rank in range(world_size)]

    def _rank(self, address, rank, store_wait, settings):
        kv = [np.full((self.layout.num_blocks, PAGE), SENTINEL, dtype=np.uint8) for _ in range(2)]
        adapter = WorkerAdapter(address, None, "m", self.layout.world_size, rank, BLOCK, **settings)
        adapter.register_kv_caches([kv])
        share = Share(address, tuple(range(self.layout.world_size)), self.layout.world_size)
        side = WorkerSide(
            adapter, partial(to_op, share=share), rank=rank, single_group=True, store_wait=store_wait
        )
        return SimpleNamespace(adapter=adapter, side=side, kv=kv, rank=rank)

    def close(self):
        self.adapter.shutdown()
        for each in self.ranks:
            each.adapter.shutdown()

    # A request on its way

    def run(self, tokens, *, local=0, table=None, **fields):
        """Ask, load, compute what is missing, store it, end. `local` tokens of `table` are there already."""
        ran = self.admit(tokens, local=local, table=table, **fields)
        self.compute(ran, local)
        self.finish(ran)
        return ran

    def admit(self, tokens, *, local=0, table=None, **fields):
        """Up to the end of its load, if it has one."""
        request = Request(next(self._names), tokens, **fields)
        external = self.ask(request, local)
        blocks = list(table or ())
        blocks += [self.free.popleft() for _ in range(-(-len(tokens) // BLOCK) - len(blocks))]
        self.scheduler.allocated(request, Blocks(blocks), external)
        ran = Ran(request, external, blocks)
        if external:
            self._load(ran)
            # As vLLM does it, and with the tokens computed that a load has brought.
            self.scheduler.allocated(request, Blocks(blocks), 0)
        return ran

    def ask(self, request, local=0):
        eventually(lambda: self.scheduler.matched_tokens(request, local) is not None)
        return self.scheduler.matched_tokens(request, local)

    def compute(self, ran, local=0):
        """What has failed to load is computed too."""
        count = len(ran.request.all_token_ids)
        start = local if ran.failed else local + ran.external
        for each in self.ranks:
            right = self.right(ran.request, each.rank)
            for position in range(start, count):
                self._slot(each, ran.table, position)[:] = right[position]
        ran.request.num_computed_tokens = start
        scheduled = SimpleNamespace(req_id=ran.request.request_id, block_ids=[ran.table])
        scheduled.num_computed_tokens = start
        self.step(
            step_output(
                {ran.request.request_id: count - start},
                new=[scheduled],
                tables={ran.request.request_id: [ran.table]},
            )
        )
        ran.request.num_computed_tokens = count

    def finish(self, ran):
        """Its blocks are free when all workers have said that it is stored."""
        if self.scheduler.finished(ran.request):
            eventually(lambda: ran.request.request_id in self.step(step_output()).finished_sending)
        self.free.extend(ran.table)

    def _load(self, ran):
        name, received = ran.request.request_id, set()

        def loaded():
            output = self.step(step_output(), received)
            ran.failed_blocks |= frozenset(output.invalid_block_ids)
            return name in output.finished_recving

        eventually(loaded)
        ran.failed = bool(ran.failed_blocks & set(ran.table))

    def step(self, scheduler_output, received=None):
        """One step of all workers. A load or store is over when every rank has said so, as vLLM counts it."""
        step = self.scheduler.step(scheduler_output)
        assert isinstance(step, StepMetadata)
        arrived, bad, report = [], set(), None
        for each in self.ranks:
            each.side.make_room(step)
            each.side.start_loads(step.loads)
            each.side.after_forward(step)
            results = each.side.results(step)
            self._sent.update(results.sent)
            arrived += [(each.rank, name) for name in results.received]
            bad |= each.side.take_failed_blocks()
            told = each.side.take_report()
            report = told if report is None or told is None else report.aggregate(told)
        known = received if received is not None else set()
        known |= set(arrived)
        names = {name for _, name in known}
        whole = {name for name in names if all((each.rank, name) in known for each in self.ranks)}
        sent = {name for name, count in self._sent.items() if count == len(self.ranks)}
        for name in sent:
            del self._sent[name]
        output = worker_output(received=whole, sent=sent, bad_blocks=bad, report=report)
        self.scheduler.worker_output(output)
        return output

    # What is in memory

    def right(self, request, rank):
        """The KV of every token of a request."""
        lora = request.lora_request
        seed = repr((rank, lora and (lora.lora_name, lora.lora_path), request.cache_salt)).encode()
        digest = hashlib.sha256(seed)
        found = []
        for position, token in enumerate(request.all_token_ids):
            digest.update(token.to_bytes(4, "little"))
            for each in request.mm_features:
                where = each.mm_position
                if where.offset <= position < where.offset + where.length:
                    digest.update(repr((each.identifier, position - where.offset)).encode())
            found.append(np.frombuffer(digest.digest()[:SLOT_BYTES], dtype=np.uint8))
        return found

    def is_right(self, ran, start=0, stop=None):
        """Whether these tokens' slots hold what computing them would have put there, on all ranks."""
        stop = len(ran.request.all_token_ids) if stop is None else stop
        return all(
            (layer == right[position]).all()
            for each in self.ranks
            for right in [self.right(ran.request, each.rank)]
            for position in range(start, stop)
            for layer in self._slot(each, ran.table, position)
        )

    def is_untouched(self, ran, start, stop):
        return all(
            (self._slot(each, ran.table, position) == SENTINEL).all()
            for each in self.ranks
            for position in range(start, stop)
        )

    def wipe(self):
        """Put the sentinel everywhere."""
        for each in self.ranks:
            for layer in each.kv:
                layer[:] = SENTINEL

    @staticmethod
    def _slot(rank, table, position):
        """One token's place in all layers: (layers, bytes)."""
        block, offset = table[position // BLOCK], position % BLOCK * SLOT_BYTES
        return _Slots([layer[block, offset : offset + SLOT_BYTES] for layer in rank.kv])


class _Slots(list):
    """Written and compared as one."""

    def __setitem__(self, key, value):
        for layer in self:
            layer[:] = value

    def __eq__(self, other):
        return np.array([layer == other for layer in self])

    __hash__ = None
