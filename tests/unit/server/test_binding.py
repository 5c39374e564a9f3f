from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvwire.errors import (
    AlignmentInvalid,
    AlignmentTooLarge,
    BindingIncomplete,
    ChunkSizeIncompatible,
    ChunkSizeNotNegotiated,
    ConfigError,
    KvwireError,
    ResizeRefused,
)
from kvwire.keys import required_alignment
from kvwire.server.binding import Binder, BinderState, BoundSize, ChunkSizeBinding

NAMES = ["token hasher", "session manager", "blend matcher", "telemetry", "coordinator membership"]


class Part:
    """A binder that fails as often as it is told to and records what it was given."""

    def __init__(self, name):
        self.name = name
        self.failures_left = 0
        self.calls = []
        self.size = None
        self.during = None

    def bind(self, size):
        self.calls.append(size)
        if self.during is not None:
            self.during()
        if self.failures_left:
            self.failures_left -= 1
            raise OSError(f"{self.name} is not ready")
        self.size = size


def server(minimum=256, maximum=65_536, names=NAMES):
    parts = [Part(name) for name in names]
    return ChunkSizeBinding(minimum, maximum, [Binder(part.name, part.bind) for part in parts]), parts


def states(binding):
    return [binder.state for binder in binding.status().binders]


def test_before_the_first_negotiation_there_is_no_chunk_size():
    binding, _ = server()
    with pytest.raises(ChunkSizeNotNegotiated, match="NegotiateChunkSize"):
        binding.require()
    assert (binding.bound, binding.status().chosen, binding.status().complete) == (None, None, False)
    assert set(states(binding)) == {BinderState.PENDING}


def test_binders_run_once_each_in_order():
    binding, parts = server()
    order = []
    for part in parts:
        part.during = lambda part=part: order.append(part.name)
    assert binding.negotiate(544, "scheduler") == BoundSize(544, 544, "scheduler")
    assert order == NAMES
    assert [part.calls for part in parts] == [[544]] * len(parts)
    assert binding.require() == 544
    assert binding.status().complete
    assert set(states(binding)) == {BinderState.BOUND}


def test_a_server_without_binders_binds_at_once():
    binding, _ = server(names=[])
    assert binding.negotiate(96, "a").chunk_size == binding.require() == 288


def test_a_later_client_with_a_divisor_gets_the_same_answer():
    binding, parts = server(minimum=600)
    first = binding.negotiate(544, "first")
    assert first.chunk_size == 1088
    assert [binding.negotiate(alignment, "later") for alignment in (544, 272, 1088, 1, 17)] == [first] * 5
    assert [part.calls for part in parts] == [[1088]] * len(parts)


def test_an_incompatible_client_learns_what_is_bound_and_by_whom():
    binding, parts = server()
    binding.negotiate(544, "first")
    before = binding.status()
    with pytest.raises(ChunkSizeIncompatible, match="544") as caught:
        binding.negotiate(256, "second")
    assert caught.value.metadata == {
        "bound_size": "544",
        "bound_alignment": "544",
        "bound_by": "first",
        "alignment": "256",
    }
    assert (binding.status(), binding.require()) == (before, 544)
    assert [part.calls for part in parts] == [[544]] * len(parts)


@pytest.mark.parametrize("bound_before", [False, True])
def test_a_client_that_can_use_one_size_only_is_refused_another_and_settles_nothing(bound_before):
    binding, parts = server(minimum=512)
    if bound_before:
        binding.negotiate(16, "first")
    before = binding.status()
    with pytest.raises(ChunkSizeIncompatible, match="--chunk-size 256, or restart the engine") as caught:
        binding.negotiate(16, "second", expected=256)
    assert "second works with 256" in str(caught.value)
    assert caught.value.metadata["bound_size"] == "512"
    assert binding.status() == before
    assert [len(part.calls) for part in parts] == [int(bound_before)] * len(parts)
    assert binding.negotiate(16, "third", expected=512).chunk_size == 512


@pytest.mark.parametrize("state", ["new", "incomplete", "bound"])
def test_bad_input_is_the_same_error_in_every_state(state):
    binding, parts = server()
    if state != "new":
        parts[2].failures_left = int(state == "incomplete")
        try:
            binding.negotiate(256, "first")
        except BindingIncomplete:
            assert state == "incomplete"
    before = binding.status()
    for alignment in (0, -1):
        with pytest.raises(AlignmentInvalid):
            binding.negotiate(alignment, "x")
    with pytest.raises(AlignmentTooLarge):
        binding.negotiate(65_537, "x")
    assert binding.status() == before


@pytest.mark.parametrize(("minimum", "maximum"), [(0, 10), (-1, 10), (11, 10), (1, 0)])
def test_a_server_that_could_never_bind_does_not_start(minimum, maximum):
    with pytest.raises(ConfigError, match="--max-chunk-size"):
        server(minimum, maximum)


def test_binders_need_names_of_their_own():
    with pytest.raises(ValueError, match="names"):
        server(names=["a", "a"])


def test_a_failing_binder_shows_in_the_status_until_it_succeeds():
    binding, parts = server()
    parts[1].failures_left = 2
    for _ in range(2):
        with pytest.raises(BindingIncomplete, match="session manager") as caught:
            binding.negotiate(256, "w0")
        assert isinstance(caught.value.__cause__, OSError)
        assert "not ready" not in str(caught.value)
    assert states(binding) == ["bound", "failed", "pending", "pending", "pending"]
    failed = binding.status().binders[1]
    assert (failed.failures, failed.last_error) == (2, "OSError: session manager is not ready")
    binding.negotiate(256, "w1")
    assert (binding.status().binders[1].failures, binding.status().binders[1].last_error) == (2, "")
    assert binding.bound == BoundSize(256, 256, "w0")


def test_an_interrupt_in_a_binder_leaves_a_binding_that_can_be_resumed():
    binding, parts = server()

    def interrupt():
        parts[3].during = None
        raise KeyboardInterrupt

    parts[3].during = interrupt
    parts[1].failures_left = 1
    with pytest.raises(BindingIncomplete):
        binding.negotiate(256, "a")
    with pytest.raises(KeyboardInterrupt):
        binding.negotiate(256, "a")
    assert states(binding) == ["bound", "bound", "bound", "pending", "pending"]
    with pytest.raises(ChunkSizeNotNegotiated):
        binding.require()
    assert binding.negotiate(256, "a").chunk_size == 256
    assert [len(part.calls) for part in parts] == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("alignment", [256, 544])
def test_a_call_from_inside_a_binder_is_refused_and_harms_nothing(alignment):
    binding, parts = server()
    seen = []

    def reenter():
        for call in (lambda: binding.negotiate(alignment, "inner"), binding.require):
            with pytest.raises((BindingIncomplete, ChunkSizeNotNegotiated)) as caught:
                call()
            seen.append(caught.type)

    for part in (parts[0], parts[-1]):
        part.during = reenter
    assert binding.negotiate(256, "outer") == BoundSize(256, 256, "outer")
    assert seen == [BindingIncomplete, ChunkSizeNotNegotiated] * 2
    assert binding.bound == BoundSize(256, 256, "outer")
    assert [part.calls for part in parts] == [[256]] * len(parts)


@pytest.mark.parametrize(
    ("minimum", "spans", "final"),
    [
        (256, [256], 256),
        (256, [272], 272),
        (300, [272], 544),
        (257, [256], 512),
        (1, [7], 7),
        (1024, [400], 1200),
        (255, [1], 255),
        (256, [48, 80], 480),
    ],
)
def test_bl01_the_first_negotiation_settles_a_size_for_any_block_span(minimum, spans, final):
    binding, _ = server(minimum)
    assert binding.negotiate(required_alignment(spans), "scheduler").chunk_size == final == binding.require()


@pytest.mark.parametrize("bad", [0, -96, 65521 * 65519 * 65497])
def test_bl02_after_a_refusal_the_server_is_still_unnegotiated_and_a_good_call_succeeds(bad):
    binding, parts = server()
    with pytest.raises((AlignmentInvalid, AlignmentTooLarge)) as caught:
        binding.negotiate(bad, "x")
    assert caught.value.code == "INVALID_ARGUMENT"
    with pytest.raises(ChunkSizeNotNegotiated):
        binding.require()
    assert all(not part.calls for part in parts)
    assert binding.negotiate(required_alignment([96, 0, 96]), "x").chunk_size == 288


def partly_bound():
    binding, parts = server(names=NAMES[:4])
    parts[1].failures_left = 1
    with pytest.raises(BindingIncomplete):
        binding.negotiate(256, "scheduler")
    return binding, parts


def test_bl04_no_success_and_no_service_while_a_binder_is_missing():
    binding, parts = partly_bound()
    with pytest.raises(ChunkSizeNotNegotiated, match="session manager") as caught:
        binding.require()
    assert caught.value.code == "FAILED_PRECONDITION"
    assert [part.size for part in parts] == [256, None, None, None]


def test_bl04_a_retry_runs_only_the_missing_binders():
    binding, parts = partly_bound()
    assert binding.negotiate(256, "scheduler").chunk_size == 256
    assert [len(part.calls) for part in parts] == [1, 2, 1, 1]
    assert binding.require() == 256


@pytest.mark.parametrize("alignment", [544, 128, 512])
def test_bl04_another_alignment_never_binds_two_sizes(alignment):
    binding, parts = partly_bound()
    with pytest.raises(BindingIncomplete) as caught:
        binding.negotiate(alignment, "other")
    assert caught.value.metadata == {
        "pending_size": "256",
        "pending_alignment": "256",
        "bound_by": "scheduler",
        "binder": "session manager",
    }
    assert [part.calls for part in parts] == [[256], [256], [], []]
    assert binding.negotiate(256, "worker") == BoundSize(256, 256, "scheduler")


def test_bl04_with_no_binder_done_another_alignment_starts_afresh():
    binding, parts = server()
    parts[0].failures_left = 1
    with pytest.raises(BindingIncomplete):
        binding.negotiate(256, "first")
    assert binding.negotiate(544, "second") == BoundSize(544, 544, "second")
    assert {part.size for part in parts} == {544}


def test_bl04_after_a_session_the_same_size_is_confirmed_and_another_refused():
    binding, _ = server()
    first = binding.negotiate(256, "a")
    binding.session_started()
    assert binding.negotiate(256, "a") == binding.negotiate(128, "b") == first
    with pytest.raises(ChunkSizeIncompatible):
        binding.negotiate(544, "c")
    assert binding.status().sessions_started


def test_bl04_a_resize_is_refused_for_good_once_a_session_started_even_half_bound():
    binding, parts = server()
    parts[0].failures_left = 1
    with pytest.raises(BindingIncomplete):
        binding.negotiate(256, "first")
    binding.session_started()
    for _ in range(2):
        with pytest.raises(ResizeRefused) as caught:
            binding.negotiate(544, "second")
        assert caught.value.metadata == {"bound_size": "256", "alignment": "544"}
    assert binding.negotiate(256, "first").chunk_size == 256


def test_bl04_scheduler_and_workers_all_get_one_size_while_binders_fail():
    binding, parts = server()
    for part in parts:
        part.failures_left = 1
    callers = ["scheduler", "worker 0", "worker 1", "worker 2"]
    answers = {}
    while len(answers) < len(callers):
        for caller in callers:
            try:
                answers[caller] = binding.negotiate(544, caller)
            except BindingIncomplete:
                assert not answers
    assert set(answers.values()) == {BoundSize(544, 544, "scheduler")}
    assert [len(part.calls) for part in parts] == [2] * len(parts)


MINIMUM, MAXIMUM = 40, 200
ALIGNMENTS = st.sampled_from([-1, 0, 1, 5, 8, 10, 16, 20, 40, 48, 96, 100, 201, 2**60])
CALLERS = st.sampled_from(["scheduler", "worker 0", "worker 1", "another model"])


class BindingMachine(RuleBasedStateMachine):
    """The model: who chose which size, how many parts have it, and whether a session ever started."""

    def __init__(self):
        super().__init__()
        self.binding, self.parts = server(MINIMUM, MAXIMUM, NAMES[:3])
        self.chosen = None
        self.done = 0
        self.sessions = False
        self.failures = [0] * len(self.parts)

    @rule(part=st.integers(0, 2), times=st.integers(1, 3))
    def a_part_will_fail(self, part, times):
        self.parts[part].failures_left = times

    @rule()
    def a_session_starts(self):
        self.binding.session_started()
        self.sessions = True

    @rule(alignment=ALIGNMENTS, who=CALLERS)
    def somebody_negotiates(self, alignment, who):
        expected = self.expect(alignment, who)
        try:
            outcome = self.binding.negotiate(alignment, who)
        except KvwireError as error:
            outcome = type(error)
        assert outcome == expected

    @precondition(lambda self: self.chosen)
    @rule(who=CALLERS)
    def somebody_repeats_the_first_call(self, who):
        self.somebody_negotiates(self.chosen.alignment, who)

    def expect(self, alignment, who):
        if alignment < 1:
            return AlignmentInvalid
        size = next(
            size
            for size in range(alignment, alignment + MINIMUM + 1)
            if size >= MINIMUM and size % alignment == 0
        )
        if size > MAXIMUM:
            return AlignmentTooLarge
        if self.done == len(self.parts):
            return self.chosen if self.chosen.chunk_size % alignment == 0 else ChunkSizeIncompatible
        if self.chosen and self.chosen.alignment != alignment:
            if self.sessions and self.chosen.chunk_size != size:
                return ResizeRefused
            if self.done:
                return BindingIncomplete
            self.chosen = None
        self.chosen = self.chosen or BoundSize(size, alignment, who)
        return self.run_parts()

    def run_parts(self):
        while self.done < len(self.parts):
            if self.parts[self.done].failures_left:
                self.failures[self.done] += 1
                return BindingIncomplete
            self.done += 1
        return self.chosen

    @invariant()
    def one_size_at_most_and_each_part_took_it_once(self):
        sizes = [part.size for part in self.parts]
        assert sizes[: self.done] == [self.chosen.chunk_size] * self.done if self.chosen else self.done == 0
        assert sizes[self.done :] == [None] * (len(sizes) - self.done)
        calls = [len(part.calls) for part in self.parts]
        assert calls == [failed + (i < self.done) for i, failed in enumerate(self.failures)]

    @invariant()
    def the_size_is_in_force_exactly_when_all_parts_have_it(self):
        complete = self.done == len(self.parts)
        assert self.binding.bound == (self.chosen if complete else None)
        if complete:
            assert self.binding.require() == self.chosen.chunk_size
        else:
            with pytest.raises(ChunkSizeNotNegotiated):
                self.binding.require()

    @invariant()
    def the_status_tells_the_truth(self):
        status = self.binding.status()
        assert (status.chosen, status.sessions_started) == (self.chosen, self.sessions)
        assert status.complete == (self.done == len(self.parts))
        assert [binder.failures for binder in status.binders] == self.failures
        assert [binder.state == BinderState.BOUND for binder in status.binders] == [
            i < self.done for i in range(len(self.parts))
        ]
        assert all(
            later != BinderState.BOUND or earlier == BinderState.BOUND
            for earlier, later in pairwise(states(self.binding))
        )
        assert all(
            bool(binder.last_error) == (binder.state == BinderState.FAILED) for binder in status.binders
        )


TestBindingMachine = BindingMachine.TestCase
