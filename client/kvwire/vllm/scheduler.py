"""The scheduler's side: what to look up, what to load, what to store. Nothing here waits for the server."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from kvwire import telemetry
from kvwire.vllm.accounts import Accounts
from kvwire.vllm.blocks import given_out
from kvwire.vllm.layerwise import OpenLoads, blocks_behind
from kvwire.vllm.layout import ChunkCut
from kvwire.vllm.metadata import Job, Prompt, StepMetadata
from kvwire.vllm.params import answer
from kvwire.vllm.plan import (
    BlockPlan,
    PlanError,
    external_tokens,
    known_states,
    load_plan,
    store_plan,
    tokens_to_ask,
)
from kvwire.vllm.states import keep_state, note_states
from kvwire.vllm.tracker import RequestTracker, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvwire.vllm.layout import EngineLayout
    from kvwire.vllm.lazy import LazyStores
    from kvwire.vllm.ports import Lookups, Naming
    from kvwire.vllm.tally import Tally

logger = logging.getLogger(__name__)

_PAUSE: Final = 0.001
"""An engine with nothing to compute steps 19,000 times a second: so long does such a step wait instead."""


class SchedulerSide:
    """One per engine. `loads` and `stores` say what the engine's role allows."""

    def __init__(
        self,
        layout: EngineLayout,
        lookups: Lookups,
        track: Callable[[Any], RequestTracker],
        *,
        loads: bool = True,
        stores: bool = True,
        early_lookups: int = 64,
        overlap: bool = False,
        tally: Tally | None = None,
    ) -> None:
        self._layout = layout
        self._lookups = lookups
        self._track = track
        self._may_load = loads
        self._may_store = stores
        self._early_lookups = early_lookups
        self.overlap = overlap
        self._open_loads = OpenLoads(layout.world_size)
        self._accounts = Accounts(tally)
        self.naming: Naming | None = None
        self.lazy: LazyStores | None = None
        self._cut: ChunkCut | None = None
        self._trackers: dict[str, RequestTracker] = {}
        self._unanswered: set[str] = set()
        self._early: set[str] = set()
        self._new_loads: list[Job] = []
        self._held: set[str] = set()
        self._closing: dict[str, str] = {}
        self._open_stores = 0
        self._unhealthy_ranks: set[int] = set()

    # What the engine asks before it admits a request

    def arrived(self, request: Any) -> None:
        """A new request: its prompt is looked up while it waits, unless many are looked up already."""
        tracker = self._tracker(request)
        cut = self._chunks()
        if cut is None or len(self._early) >= self._early_lookups or self._why_not(tracker, cut):
            return
        self._early.add(tracker.request_id)
        self._ask(tracker, cut)

    def matched_tokens(self, request: Any, num_computed: int) -> int | None:
        """How many tokens beyond `num_computed` a load would bring. None: not known yet, ask again."""
        tracker, cut = self._tracker(request), self._chunks()
        tokens = self._promise(tracker, cut, num_computed)
        if cut is not None and tokens is not None and self._may_store:
            keep_state(request, cut, num_computed + tokens)
        return tokens

    def _promise(self, tracker: RequestTracker, cut: ChunkCut | None, num_computed: int) -> int | None:
        if tracker.preemptions != tracker.request.num_preemptions:
            self._start_over(tracker)
        tracker.local = num_computed
        reason = self._why_not(tracker, cut)
        if cut is None or reason:
            self._accounts.not_asked(tracker, reason)
            # What an earlier answer promised may be gone with the server.
            tracker.hit = 0
            self._unanswered.discard(tracker.request_id)
            return 0
        if tracker.stage is Stage.ASKED and self._lookups.is_lookup_stale(tracker.session_id):
            self._start_over(tracker)
        if tracker.stage is Stage.NEW:
            self._ask(tracker, cut)
        hit = self._lookups.check_lookup_result(tracker.session_id)
        if hit is None:
            self._unanswered.add(tracker.request_id)
            return None
        self._unanswered.discard(tracker.request_id)
        tracker.hit = hit
        self._accounts.answered(tracker, hit)
        tracker.promised = (
            external_tokens(cut, hit, tracker.request.num_tokens, num_computed) if self._may_load else 0
        )
        return tracker.promised

    def allocated(self, request: Any, blocks: Any, num_external: int) -> None:
        """The engine has blocks for a request. With external tokens a load begins; else leases end."""
        tracker = self._tracker(request)
        if num_external > 0:
            self._load(tracker, blocks, num_external)
        elif tracker.stage is not Stage.LOADING:
            self._admit(tracker)

    def finished(self, request: Any) -> bool:
        """Forget a request. True: its blocks are still being stored; the workers will say when no more."""
        tracker = self._trackers.pop(request.request_id, None)
        self._unanswered.discard(request.request_id)
        self._early.discard(request.request_id)
        if tracker is None:
            return False
        # The engine frees a request that is loading itself, when the load ends, and must not be told twice.
        if tracker.open_stores > 0 and (self.overlap or tracker.stage is not Stage.LOADING):
            self._held.add(tracker.request_id)
            self._closing[tracker.request_id] = tracker.session_id
            return True
        self._lookups.end_session(tracker.session_id)
        return False

    def answer(self, request: Any) -> dict[str, Any] | None:
        """What the response says of a request that ends, if the request has asked for it."""
        tracker = self._trackers.get(request.request_id)
        if tracker is None or not tracker.params.stats:
            return None
        return answer(tracker.account, int(request.num_prompt_tokens))

    def reset(self, timeout: float) -> bool:
        """Empty the server of this model. True: nothing of before is there, or will be there.

        Waits `timeout` seconds at most. What requests hold now is not stored unless it is computed again.
        """
        for tracker in self._trackers.values():
            if tracker.stage is Stage.ASKED:
                self._lookups.release_lookup(tracker.session_id, tracker.released_chunks)
                self._start_over(tracker)
            tracker.outdated = tracker.stage is not Stage.NEW
        if self.lazy is not None:
            self.lazy.forget()
        kept = self._lookups.clear(timeout)
        if kept or self._open_stores:
            logger.warning(
                "kvwire: reset: %d chunks are in use and %d stores under way", kept or 0, self._open_stores
            )
        return kept == 0 and not self._open_stores

    @property
    def tally(self) -> Tally:
        return self._accounts.tally

    def is_usable(self) -> bool:
        return self._lookups.is_healthy and not self._unhealthy_ranks

    # What the engine says in every step

    def step(self, scheduler_output: Any) -> StepMetadata:
        """The loads and stores of one step. Whatever fails, loads are handed on: somebody waits for them."""
        step = StepMetadata(loads=self._new_loads, held=frozenset(self._held), overwritten=None)
        step.chunk_size = self._cut.chunk_size if self._cut else 0
        self._new_loads, self._held = [], set()
        try:
            self._fill(step, scheduler_output)
        except Exception:
            logger.exception("kvwire: nothing is stored in this step")
        return step

    def _fill(self, step: StepMetadata, scheduler_output: Any) -> None:
        step.idle = scheduler_output.total_num_scheduled_tokens == 0
        if step.idle and self._unanswered:
            self._lookups.wait_for_lookups(_PAUSE)
        step.overwritten = frozenset()
        if self._open_stores > 0:
            step.overwritten = None
            blocks = given_out(scheduler_output, self._layout)
            step.overwritten = blocks.union(*(job.plan.block_ids for job in step.loads))
        # These read what this step writes, so they come after it.
        step.stores = self._stores(scheduler_output)

    def worker_output(self, output: Any) -> None:
        """What the workers have finished."""
        report = output.kv_connector_worker_meta
        if report is not None:
            self._take_report(report)
        failed = set(output.failed_recving or ()) | self._loading_into(output.invalid_block_ids or ())
        for request_id in failed:
            self._load_failed(request_id)
        ended = self._open_loads.end(report.ended_loads) if report is not None else ()
        for request_id in (*(output.finished_recving or ()), *ended):
            tracker = self._trackers.get(request_id)
            if tracker is not None:
                self._accounts.loaded(tracker)
                self._admit(tracker)
        for request_id in output.finished_sending or ():
            session = self._closing.pop(request_id, None)
            if session is not None:
                self._lookups.end_session(session)

    def _take_report(self, report: Any) -> None:
        for rank, healthy in report.healthy.items():
            (self._unhealthy_ranks.discard if healthy else self._unhealthy_ranks.add)(rank)
        for request_id, count in report.ended_stores.items():
            self._open_stores -= count
            if self.lazy is not None:
                self.lazy.ended(request_id, count)
            tracker = self._trackers.get(request_id)
            if tracker is not None:
                tracker.open_stores -= count

    # Lookups

    def _tracker(self, request: Any) -> RequestTracker:
        tracker = self._trackers.get(request.request_id)
        if tracker is None:
            tracker = self._trackers[request.request_id] = self._track(request)
        return tracker

    def _chunks(self) -> ChunkCut | None:
        """None until the server has said its chunk size, which then stays for good."""
        if self._cut is None and self._lookups.chunk_size is not None:
            self._cut = ChunkCut.make(self._layout, self._lookups.chunk_size)
        return self._cut

    def _why_not(self, tracker: RequestTracker, cut: ChunkCut | None) -> str:
        """Why a request's prompt is not looked up; empty when it is. A user reads it: no addresses."""
        if cut is None or not self._lookups.is_healthy:
            return "degraded: the server is not used"
        if self._unhealthy_ranks:
            return "degraded: a worker does not use its server"
        # The engine ignores a hit of a request that skips its cache; asking would only lease it.
        unless = (
            (tracker.cacheable, "this request cannot be cached"),
            (tracker.may_load, "an earlier load failed"),
            (tracker.params.load, "switched off by the request"),
            (not tracker.request.skip_reading_prefix_cache, "the request skips the prefix cache"),
            (self._askable_tokens(tracker, cut), "fewer tokens than a chunk"),
        )
        return next((reason for good, reason in unless if not good), "")

    def _askable_tokens(self, tracker: RequestTracker, cut: ChunkCut) -> int:
        limit = tracker.params.max_hit_tokens // cut.chunk_size * cut.chunk_size
        tokens = tokens_to_ask(cut, tracker.request.num_tokens)
        return min(tokens, limit) if tracker.params.max_hit_tokens else tokens

    def _ask(self, tracker: RequestTracker, cut: ChunkCut) -> None:
        tracker.asked = self._askable_tokens(tracker, cut)
        tracker.stage = Stage.ASKED
        with telemetry.attached(telemetry.context_from_headers(tracker.trace)):
            self._lookups.maybe_submit_lookup_request(
                tracker.session_id,
                tokens=tracker.request.all_token_ids[: tracker.asked],
                adapter=tracker.namespace.adapter,
                adapter_revision=tracker.namespace.adapter_revision,
                salt=tracker.namespace.salt,
                extra_inputs=tracker.extras_before(tracker.asked),
            )

    def _start_over(self, tracker: RequestTracker) -> None:
        """After a preemption, and before a lease runs out while the request waits for blocks."""
        self._lookups.cleanup_lookup_result(tracker.session_id)
        tracker.start_over()

    def _admit(self, tracker: RequestTracker) -> None:
        self._early.discard(tracker.request_id)
        self._accounts.admitted(tracker)
        if tracker.stage in {Stage.ASKED, Stage.LOADING}:
            self._lookups.release_lookup(tracker.session_id, tracker.released_chunks)
        tracker.stage = Stage.ADMITTED
        tracker.loading_blocks = frozenset()
        cut = self._chunks()
        if cut is not None and tracker.may_load:
            tracker.next_chunk = tracker.hit // cut.chunk_size
            self._name(tracker, range(tracker.next_chunk), cut)

    def _name(self, tracker: RequestTracker, chunks: range, cut: ChunkCut) -> None:
        if self.naming is not None and chunks:
            self.naming.named(tracker, chunks, cut.chunk_size)

    # Loads

    def _load(self, tracker: RequestTracker, blocks: Any, num_external: int) -> None:
        """Queue a load. One that cannot be planned is queued too, to fail: the engine waits for its end."""
        tracker.stage = Stage.LOADING
        plan = BlockPlan(())
        try:
            plan = self._load_plan(tracker, blocks.get_block_ids(), num_external)
        except PlanError as error:
            logger.warning("kvwire: request %s cannot be loaded: %s", tracker.request_id, error)
        except Exception:
            logger.exception("kvwire: request %s cannot be loaded", tracker.request_id)
        tracker.loading_blocks = plan.block_ids
        doomed: frozenset[int] = frozenset()
        if self.overlap:
            if not plan.groups:
                doomed = blocks_behind(self._layout, blocks.get_block_ids(), tracker.local)
            tracker.loading_blocks |= doomed
            self._open_loads.begin(tracker.request_id, tracker.loading_blocks)
        prompt = Prompt(tracker.session_id)
        self._new_loads.append(Job(tracker.request_id, prompt, plan, tracker.trace, doomed))

    def _load_plan(
        self, tracker: RequestTracker, tables: Sequence[Sequence[int]], num_external: int
    ) -> BlockPlan:
        cut = self._chunks()
        if cut is None or num_external != tracker.promised:
            raise PlanError(f"the engine loads {num_external} tokens instead of {tracker.promised}")
        plan = load_plan(cut, tables, tracker.local, tracker.local + num_external)
        tracker.released_chunks = tracker.local // cut.chunk_size
        if tracker.released_chunks > 0:
            self._lookups.release_lookup(tracker.session_id, 0, tracker.released_chunks)
        return plan

    def _loading_into(self, blocks: Collection[int]) -> set[str]:
        if not blocks:
            return set()
        return {
            request_id
            for request_id, tracker in self._trackers.items()
            if not tracker.loading_blocks.isdisjoint(blocks)
        }

    def _load_failed(self, request_id: str) -> None:
        tracker = self._trackers.get(request_id)
        if tracker is not None:
            # A load that fails is not tried again, and what the server had cannot be relied on.
            tracker.may_load = False
            self._accounts.load_failed(tracker)
            tracker.next_chunk = 0

    # Stores

    def _stores(self, scheduler_output: Any) -> list[Job]:
        cut = self._chunks()
        if cut is None or not self._may_store or not self._lookups.is_healthy or self._unhealthy_ranks:
            return []
        stores: list[Job] = []
        for request_id, num_new in scheduler_output.num_scheduled_tokens.items():
            tracker = self._trackers.get(request_id)
            if tracker is None or not tracker.may_store:
                continue
            try:
                chunks = range(tracker.next_chunk, tracker.storable_tokens(num_new) // cut.chunk_size)
                note_states(tracker, cut, scheduler_output, num_new)
                if chunks:
                    tables = scheduler_output.kv_connector_block_state.get_block_ids(request_id)
                    if self._open_loads.touch(tables):
                        continue  # what this step computes from such blocks may turn out wrong
                    stores.extend(self._store(tracker, cut, tables, chunks))
                    tracker.next_chunk = chunks.stop
            except Exception:
                logger.exception("kvwire: request %s is not stored", request_id)
                tracker.cacheable = False
        if self.lazy is not None:
            due = self.lazy.due()
            self._open_stores += self._layout.world_size * len(due)
            self.tally.add("stored_tokens", len(due) * cut.chunk_size)
            stores.extend(due)
        return stores

    def _store(
        self, tracker: RequestTracker, cut: ChunkCut, tables: Sequence[Sequence[int]] | None, chunks: range
    ) -> list[Job]:
        if tables is None:
            return []
        states = known_states(cut, tables, tracker.offers, tracker.local)
        plan = store_plan(cut, tables, chunks, states)
        self._name(tracker, plan.chunks, cut)
        if self.lazy is not None:
            plan = self.lazy.keep(tracker, plan, cut.chunk_size)
        if not plan.groups:
            return []
        prompt = Prompt(tracker.session_id)
        if plan.chunks.stop * cut.chunk_size > tracker.asked:
            keys = tracker.keys(plan.chunks, cut.chunk_size)
            prompt = Prompt(tracker.session_id, tracker.namespace, keys)
        self._accounts.stored(tracker, len(plan.chunks) * cut.chunk_size)
        tracker.open_stores += self._layout.world_size
        self._open_stores += self._layout.world_size
        return [Job(tracker.request_id, prompt, plan, trace=tracker.trace)]
