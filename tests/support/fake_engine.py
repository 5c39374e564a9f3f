"""Stand-ins for the engine and for the adapters, as far as the connector's two sides touch them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvwire.client.layout import GroupKind
from kvwire.keys import Namespace
from kvwire.vllm.layout import CacheGroup, EngineLayout
from kvwire.vllm.params import RequestParams
from kvwire.vllm.requests import TrackerFactory
from kvwire.vllm.scheduler import SchedulerSide

BLOCK = 32
CHUNK = 64


def group(index=0, *, window=0, span=BLOCK, layers=2, page=16, local=False, state=False):
    return CacheGroup(
        engine_index=index,
        kind=kind_of(window, state),
        span_tokens=span,
        layer_names=tuple(f"group{index}.layer{layer}" for layer in range(layers)),
        page_bytes=(page,) * layers,
        window_tokens=window,
        is_local=local,
    )


def kind_of(window, state):
    if state:
        return GroupKind.RECURRENT
    return GroupKind.SLIDING_WINDOW if window else GroupKind.FULL_ATTENTION


def layout(*groups, world_size=1, num_blocks=64, block_major=False):
    found = groups or (group(),)
    return EngineLayout(
        found, max(each.engine_index for each in found) + 1, num_blocks, world_size, block_major
    )


class Request:
    """What the connector reads of vLLM's Request."""

    def __init__(self, request_id, tokens, **fields: Any):
        self.request_id = request_id
        self.all_token_ids = list(tokens)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_preemptions = 0
        self.skip_reading_prefix_cache = False
        self.lora_request = None
        self.cache_salt = None
        self.mm_features = []
        self.prompt_embeds = None
        self.resumable = False
        for name, value in fields.items():
            setattr(self, name, value)

    @property
    def num_tokens(self):
        return len(self.all_token_ids)


class Blocks:
    """vLLM's KVCacheBlocks."""

    def __init__(self, *tables):
        self._tables = tables

    def get_block_ids(self):
        return self._tables


@dataclass
class FakeLookups:
    """SchedulerAdapter, with answers given by the test."""

    chunk_size: int | None = CHUNK
    is_healthy: bool = True
    kept: int | None = 0
    hits: dict[str, int] = field(default_factory=dict)
    stale: set[str] = field(default_factory=set)
    asked: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def maybe_submit_lookup_request(self, request_id, **what):
        if request_id not in self.asked:
            self.asked[request_id] = what
            self.calls.append(("ask", request_id))

    def check_lookup_result(self, request_id):
        return self.hits.get(request_id) if request_id in self.asked else None

    def is_lookup_stale(self, request_id):
        return request_id in self.stale

    def cleanup_lookup_result(self, request_id):
        self.asked.pop(request_id, None)
        self.calls.append(("cleanup", request_id))

    def release_lookup(self, request_id, first_chunk=0, chunk_count=0):
        self.calls.append(("release", request_id, first_chunk, chunk_count))

    def end_session(self, request_id):
        self.calls.append(("end", request_id))

    def clear(self, timeout):
        self.calls.append(("clear", timeout))
        return self.kept

    def wait_for_lookups(self, timeout):
        self.calls.append(("wait", timeout))
        return False


NAMESPACE = Namespace("model", layout_fingerprint=b"x")


def scheduler_side(lookups, *groups, world_size=1, save_decode=False, **options):
    engine = layout(*groups, world_size=world_size)
    track = TrackerFactory(NAMESPACE, RequestParams(save_decode=save_decode))
    return SchedulerSide(engine, lookups, track, **options)


def step_output(scheduled=(), *, new=(), cached=(), tables=None, states=None):
    """A SchedulerOutput. `scheduled` maps request ids to numbers of tokens, `tables` to block tables.

    `states` are the recurrent states that requests leave behind: (group, block, number of tokens).
    """
    scheduled = dict(scheduled)
    tables = tables or {}
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[each[0] for each in cached],
            new_block_ids=[each[1] for each in cached],
            num_computed_tokens=[each[2] for each in cached],
            resumed_req_ids={each[0] for each in cached if len(each) > 3},
        ),
        scheduled_spec_decode_tokens={},
        new_block_ids_to_zero=None,
        kv_cache_block_copies=None,
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=tables.get, boundary_state_offloads=states or {}
        ),
    )


def worker_output(*, received=(), sent=(), failed=(), bad_blocks=(), report=None):
    return SimpleNamespace(
        finished_recving=set(received),
        finished_sending=set(sent),
        failed_recving=set(failed),
        invalid_block_ids=set(bad_blocks),
        kv_connector_worker_meta=report,
    )


class FakeTransfer:
    def __init__(self):
        self.ended = False
        self.cancelled = False
        self.waits: list[float] = []
        self.ends_while_waiting = False

    def done(self):
        return self.ended

    def wait(self, timeout):
        self.waits.append(timeout)
        self.ended = self.ended or self.ends_while_waiting
        return self.ended

    def cancel(self):
        self.cancelled = True


@dataclass
class FakeTransfers:
    """WorkerAdapter, whose transfers end when the test says so."""

    is_healthy: bool = True
    raises: bool = False
    stores: list[tuple[str, Any, FakeTransfer]] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    waited: int = 0
    chunk_size: int = 0
    ends_while_waiting: str = ""

    def submit_store_request(self, request_id, op, event=None):
        if self.raises:
            raise RuntimeError("no")
        self.stores.append((request_id, op, FakeTransfer()))
        return self.stores[-1][2]

    def submit_retrieve_request(self, request_id, op, event=None):
        if self.raises:
            raise RuntimeError("no")
        self.loads.append(request_id)
        return FakeTransfer()

    def get_finished(self, finished):
        self.held |= set(finished)
        busy = {request_id for request_id, _, transfer in self.stores if not transfer.ended}
        sent, self.held = self.held - busy, self.held & busy
        received, self.received = self.received, set()
        return sent or None, received or None

    def failed_requests(self):
        failed, self.failed = self.failed, set()
        return failed

    def get_block_ids_with_load_errors(self):
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed

    def require_chunk_size(self, chunk_size):
        self.chunk_size = chunk_size

    def wait_for_any(self, timeout):
        self.waited += 1
        if self.ends_while_waiting:
            self.received.add(self.ends_while_waiting)
        return bool(self.ends_while_waiting)
