"""Every layout by the adapters and a real server: memory as vLLM lays it out, without an engine around it.

This covers what no engine can run on a CPU: latent attention, context parallelism, pipelines, many ranks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from e2e.test_layouts import attention, cache_config, engine_config, namespace, recurrent, several
from kvwire.vllm.adapters import LoadStoreOp, SchedulerAdapter, WorkerAdapter
from kvwire.vllm.engine import read_layout
from kvwire.vllm.layout import ChunkCut
from kvwire.vllm.plan import known_states, load_plan, store_plan
from kvwire.vllm.views import group_views
from support.local_server import local_server
from support.waiting import eventually

pytestmark = pytest.mark.usefixtures("engine_environment")

BLOCKS, CHUNK, CHUNKS = 120, 64, 3
TOKENS = list(range(CHUNKS * CHUNK + 1))
PAGE = 1 << 14


def latent(head_size=576, **fields):
    return attention("MLAAttentionSpec", num_kv_heads=1, head_size=head_size, max_tp_shards=1, **fields)


@dataclass
class Case:
    """Specifications per group, the layers of all stages, and how many objects three chunks are."""

    specs: list
    objects: int
    parallel: dict
    layout: str = "LBHNC"
    stages: tuple = ()


def case(objects, *specs, layout="LBHNC", stages=(), **parallel):
    sizes = {f"{name}_parallel_size": size for name, size in parallel.items()}
    sizes["world_size"] = parallel.get("tensor", 1) * parallel.get("pipeline", 1)
    return Case(list(specs), objects, sizes, layout, stages)


CASES = {
    "latent attention, one shard for four ranks": lambda: case(CHUNKS, latent(), tensor=4),
    "latent attention by blocks": lambda: case(CHUNKS, latent(), tensor=2, layout="BLHNC"),
    "latent attention with an indexer": lambda: case(
        CHUNKS, several(a=latent(), b=latent(128), c=latent()), tensor=2
    ),
    "latent attention with its tokens spread": lambda: case(4 * CHUNKS, latent(), tensor=4, decode_context=4),
    "attention and states": lambda: case(
        2 * 2 * CHUNKS, attention(num_kv_heads=4), recurrent(page_size_padded=PAGE), tensor=2
    ),
    "attention and states by blocks": lambda: case(
        2 * CHUNKS, attention(num_kv_heads=4), recurrent(page_size_padded=PAGE), layout="BLHNC"
    ),
    "blocks of two sizes": lambda: case(
        2 * CHUNKS, attention(), attention("SlidingWindowSpec", sliding_window=40, block_size=32)
    ),
    "chunked local attention": lambda: case(
        2 * CHUNKS, attention(), attention("ChunkedLocalAttentionSpec", attention_chunk_size=96)
    ),
    "stages of two layers and of one": lambda: case(
        2 * CHUNKS, attention(), pipeline=2, stages=(("a", "b"), ("c",))
    ),
}


class Rank:
    """One worker's memory, as vLLM makes it, with random bytes or none."""

    def __init__(self, case, rank, seed):
        import torch
        from vllm.v1.core.kv_cache_utils import kv_cache_groups_tp_replicas

        specs = [several(**dict.fromkeys(case.stages[rank], case.specs[0]))] if case.stages else case.specs
        self.cache = cache_config(*specs, layout=case.layout)
        self.cache.num_blocks = BLOCKS
        tensor = case.parallel.get("tensor_parallel_size", 1)
        context = case.parallel.get("decode_context_parallel_size", 1)
        self.cache.kv_tp_replicas = kv_cache_groups_tp_replicas(self.cache.kv_cache_groups, tensor, context)
        layers = {"get_total_num_hidden_layers": lambda: sum(map(len, case.stages))}
        self.config = engine_config(model=layers, rank=rank, **case.parallel)
        self.raw = torch.zeros(BLOCKS * (1 << 17), dtype=torch.int8)
        if seed is not None:
            replica = rank // self.cache.kv_tp_replicas
            source = torch.Generator().manual_seed(seed + replica)
            self.raw.random_(-128, 127, generator=source)
        self.layers = self._place(case.layout)
        self.layout = read_layout(self.config, self.cache)
        self.views = group_views(self.layout, self.layers)

    def _place(self, name):
        """The layers of each group one behind the other; groups lie on top of one another."""
        from vllm.v1.kv_cache_interface import KVCacheTensor, compute_layout_strides, create_kv_cache_views
        from vllm.v1.kv_cache_layout import KVCacheLayout

        layout, layers = KVCacheLayout[name], {}
        for group in self.cache.kv_cache_groups:
            per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None) or dict.fromkeys(
                group.layer_names, group.kv_cache_spec
            )
            offset = 0
            for spec in dict.fromkeys(per_layer.values()):
                names = [layer for layer, each in per_layer.items() if each == spec]
                block = PAGE * 4 if name.startswith("B") else None
                strides = compute_layout_strides(
                    spec, BLOCKS, len(names), layout, fixed_strides=(None, block, None, None, None)
                )
                tensor = KVCacheTensor(self.raw.numel(), names, strides[0], strides[1], offset)
                self.cache.kv_cache_tensors.append(tensor)
                views = create_kv_cache_views(self.raw, spec, BLOCKS, layout, tensor)
                layers.update(zip(names, views, strict=True))
                offset += len(names) * (spec.page_size_bytes if block else strides[0])
        return layers


class Engine:
    def __init__(self, case, address, name, seed=None):
        self.ranks = [Rank(case, rank, seed) for rank in range(case.parallel["world_size"])]
        self.layout = self.ranks[0].layout
        spaces = {namespace(rank.config, rank.cache) for rank in self.ranks}
        (self.space,) = spaces
        options = {
            "engine_id": name,
            "namespace": self.space,
            "layout": self.layout.kv_layout,
            "heartbeat_interval": 1.0,
        }
        shards, alignment = self.layout.num_shards, self.layout.alignment
        self.scheduler = SchedulerAdapter(address, None, "m", shards, 0, alignment, **options)
        self.workers = []
        for number, rank in enumerate(self.ranks):
            worker = WorkerAdapter(
                address, None, "m", shards, rank.layout.kv_rank(number), alignment, **options
            )
            worker.register_kv_caches(rank.views)
            self.workers.append(worker)
        self.cut = ChunkCut.make(self.layout, self.scheduler.chunk_size)

    def ask(self, session):
        chunk = self.cut.chunk_size
        self.scheduler.maybe_submit_lookup_request(
            session,
            tokens=TOKENS[: len(TOKENS) // chunk * chunk],
            adapter="",
            adapter_revision="",
            salt="",
            extra_inputs=(),
        )
        eventually(lambda: self.scheduler.check_lookup_result(session) is not None)
        return self.scheduler.check_lookup_result(session)

    def move(self, session, plan, *, store):
        op = LoadStoreOp(
            groups=plan.groups,
            first_chunk=plan.chunks.start,
            chunk_count=len(plan.chunks),
            session_id=session,
        )
        for worker in self.workers:
            (worker.submit_store_request if store else worker.submit_retrieve_request)(session, op)
        for worker in self.workers:
            ended = set()

            def poll(worker=worker, ended=ended):
                for some in worker.get_finished({session} if store else set()):
                    ended.update(some or ())
                return session in ended

            eventually(poll)
            assert not worker.failed_requests()
        self.scheduler.end_session(session)

    def tables(self, seed):
        """A block for every place of every group, none of them twice."""
        numbers = random.Random(seed).sample(range(1, BLOCKS), BLOCKS - 1)
        return [
            [numbers.pop() for _ in range(CHUNKS * self.cut.chunk_size // group.span_tokens)]
            for group in self.layout.groups
        ]

    def bytes_at(self, rank, group, block):
        return b"".join(bytes(view[block].numpy()) for view in self.ranks[rank].views[group])

    def close(self):
        for adapter in (*self.workers, self.scheduler):
            adapter.shutdown()


@pytest.fixture
def start(short_tmp):
    engines = []
    with local_server(short_tmp, chunk_size=CHUNK, l1_size=64 << 20) as server:

        def engine(case, name, seed=None):
            engines.append(Engine(case, server.address, name, seed))
            return engines[-1]

        yield SimpleNamespace(engine=engine, server=server)
        for each in engines:
            each.close()


@pytest.mark.parametrize("name", CASES)
def test_what_one_engine_stores_another_one_gets(name, start):
    case = CASES[name]()
    writer = start.engine(case, "writer", seed=7)
    tables = writer.tables(1)
    chunk = writer.cut.chunk_size
    recurrent_groups = [group.engine_index for group in writer.layout.groups if group.is_recurrent]
    offers = {
        (index, end): tables[index][end // writer.layout.groups[index].span_tokens - 1]
        for index in recurrent_groups
        for end in range(chunk, len(TOKENS), chunk)
    }
    assert writer.ask("w") == 0
    chunks = range((len(TOKENS) - 1) // chunk)
    plan = store_plan(writer.cut, tables, chunks, known_states(writer.cut, tables, offers, 0))
    writer.move("w", plan, store=True)

    reader = start.engine(case, "reader")
    hit = len(chunks) * chunk
    assert reader.ask("r") == hit
    assert start.server.engine.store.resident_objects == case.objects * len(chunks) // CHUNKS
    places = reader.tables(2)
    reader.move("r", load_plan(reader.cut, places, 0, hit), store=False)
    for index, group in enumerate(reader.layout.groups):
        for position in range(group.first_needed_block(hit), hit // group.span_tokens):
            for rank in range(len(reader.ranks)):
                got = reader.bytes_at(rank, index, places[index][position])
                assert got == writer.bytes_at(rank, index, tables[index][position])
                assert any(got)
    start.server.check()
