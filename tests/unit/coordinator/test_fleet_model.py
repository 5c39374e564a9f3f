"""Random events, duplicates, reorderings, losses, restarts of either side and snapshots against servers that
know what they hold. Once it is quiet the directory is what they hold, with nothing but the timers' help."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvwire.coordinator.fleet import Fleet, FleetConfig, Pull
from kvwire.errors import IncarnationStale, ServerNotRegistered
from support.fleet_model import L1, L2, FakeBatch, FakeServer, FleetRun, Snapshot, chunk

NAMES = ["a", "b"]
KEYS = [chunk(number) for number in range(4)]
NAME = st.sampled_from(NAMES)
KEY = st.sampled_from(KEYS)
TIER = st.sampled_from([L1, L1, L2])
INDEX = st.integers(0, 1000)
RARELY = st.integers(0, 3).map(lambda number: number == 3)


@dataclass
class Answer:
    pull: Pull
    taken: Snapshot | None = None
    told: int = 0


class FleetMachine(RuleBasedStateMachine):
    @initialize(kept=st.sampled_from([2, 1_000_000]), deleted=st.sampled_from([1, 1_000_000]))
    def start(self, kept: int, deleted: int) -> None:
        self.config = FleetConfig(max_deleted_while_loading=deleted, max_kept_events=kept)
        self.run = FleetRun(config=self.config)
        self.run.servers = {name: FakeServer(name) for name in NAMES}
        self.wire: list[FakeBatch] = []
        self.sent: list[FakeBatch] = []
        self.answers: list[Answer] = []

    @rule(name=NAME, keys=st.lists(KEY, min_size=1, max_size=3), tier=TIER, size=st.integers(1, 9))
    def store(self, name, keys, tier, size):
        for key in keys:
            self.run.servers[name].store(key, size, tier)

    @rule(name=NAME, index=INDEX)
    def delete_what_it_has(self, name, index):
        server = self.run.servers[name]
        if server.held:
            tier, key = sorted(server.held)[index % len(server.held)]
            server.delete(key, tier)

    @rule(name=NAME, key=KEY, tier=TIER)
    def delete(self, name, key, tier):
        self.run.servers[name].delete(key, tier)

    @rule(name=NAME, tier=TIER, happens=RARELY)
    def clear(self, name, tier, happens):
        if happens:
            self.run.servers[name].clear(tier)

    @rule(name=NAME, arrives=st.booleans())
    def send(self, name, arrives):
        self._close(self.run.servers[name])
        while arrives and self.wire:
            self._deliver(self.wire.pop(0))

    @rule(name=NAME, told=st.booleans())
    def lose(self, name, told):
        """A batch never arrives, and the server knows it, or does not."""
        server = self.run.servers[name]
        lost = server.lost
        server.close()
        server.lost = lost + 1 if told else 0

    @precondition(lambda self: self.wire)
    @rule(index=INDEX, first=st.booleans())
    def arrive(self, index, first):
        self._deliver(self.wire.pop(0 if first else index % len(self.wire)))

    @precondition(lambda self: self.sent)
    @rule(index=INDEX)
    def arrive_again(self, index):
        self._deliver(self.sent[index % len(self.sent)])

    @rule(name=NAME)
    def register(self, name):
        self.run.fleet.register(self.run.servers[name].info, self.run.now)

    @rule(name=NAME)
    def beat(self, name):
        try:
            self.run.beat(name)
        except ServerNotRegistered:
            self.run.fleet.register(self.run.servers[name].info, self.run.now)

    @rule(name=NAME, happens=RARELY)
    def leave(self, name, happens):
        if happens and self.run.fleet.deregister(name, self.run.servers[name].incarnation):
            assert name not in self.run.held()

    @rule(name=NAME, beats=st.booleans())
    def restart_server(self, name, beats):
        server = self.run.servers[name]
        old = server.incarnation
        server.restart()
        if not beats:
            return
        self.run.fleet.register(server.info, self.run.now)
        assert not any(tier == L1 for tier, _ in self.run.held().get(name, {}))
        with pytest.raises((IncarnationStale, ServerNotRegistered)):
            self.run.fleet.heartbeat(name, old, self.run.now)

    @rule(happens=RARELY)
    def restart_coordinator(self, happens):
        if happens:
            self.run.fleet = Fleet(self.config)
            self.answers = []

    @rule(seconds=st.sampled_from([0.5, 2.0, 2.0, 2.0, 4.0, 31.0]))
    def wait(self, seconds):
        self.run.now += seconds
        self.run.fleet.tick(self.run.now)

    @rule(answered=st.booleans())
    def ask_for_snapshots(self, answered):
        asked = [Answer(pull) for pull in self.run.fleet.pulls(self.run.now)]
        self.answers += asked
        for answer in asked if answered else ():
            answer.taken = self._snapshot(answer.pull.server_id)
            while answer.told >= 0:
                self._page(answer, 2)

    @precondition(lambda self: self.answers)
    @rule(index=INDEX)
    def take_snapshot(self, index):
        answer = self.answers[index % len(self.answers)]
        if answer.taken is None:
            answer.taken = self._snapshot(answer.pull.server_id)

    @precondition(lambda self: any(answer.taken for answer in self.answers))
    @rule(index=INDEX, count=st.integers(0, 3))
    def page_arrives(self, index, count):
        answers = [answer for answer in self.answers if answer.taken]
        self._page(answers[index % len(answers)], count)

    @precondition(lambda self: self.answers)
    @rule(index=INDEX)
    def snapshot_fails(self, index):
        answer = self.answers.pop(index % len(self.answers))
        self.run.fleet.fail_pull(answer.pull, self.run.now)

    @rule(limit=st.integers(1, 5))
    def sweep(self, limit):
        self.run.fleet.sweep(limit)

    @invariant()
    def exact(self):
        if hasattr(self, "run"):
            self.run.fleet.directory.check_integrity()

    @invariant()
    def only_members_are_located(self):
        if hasattr(self, "run"):
            members = {member.info.server_id for member in self.run.fleet.members.all()}
            for key in KEYS:
                assert {name for name, _ in self.run.fleet.locate([key]).prefixes} <= members

    def teardown(self):
        if not hasattr(self, "run"):
            return
        for answer in self.answers:
            self.run.fleet.fail_pull(answer.pull, self.run.now)
        self.answers = []
        for _ in range(20):
            self._quiet_second()
        told = self.run.held()
        for name, server in self.run.servers.items():
            assert told.get(name, {}) == server.held
            assert self.run.reporting(name) in {"current", "silent"}
        while self.run.fleet.sweep(3):
            self.exact()
        self.exact()
        assert self.run.fleet.directory.stats().keys == len(
            {key for held in told.values() for _, key in held}
        )

    def _quiet_second(self) -> None:
        self.run.now += 1
        for name, server in self.run.servers.items():
            if server.events:
                self._close(server)
            self.beat(name)
        while self.wire:
            self._deliver(self.wire.pop(0))
        self.run.fleet.tick(self.run.now)
        for pull in self.run.fleet.pulls(self.run.now):
            answer = Answer(pull, self._snapshot(pull.server_id))
            while answer.told >= 0:
                self._page(answer, 2)

    def _close(self, server: FakeServer) -> None:
        batch = server.close()
        self.wire.append(batch)
        self.sent = [*self.sent[-20:], batch]

    def _deliver(self, batch: FakeBatch) -> None:
        reported = self.run.deliver(batch)
        server = self.run.servers[batch.server_id]
        if reported is None and batch.incarnation == server.incarnation:
            self.run.fleet.register(server.info, self.run.now)
            assert self.run.deliver(batch) is not None

    def _snapshot(self, name: str) -> Snapshot:
        server = self.run.servers[name]
        if server.events:
            self._close(server)
        return server.snapshot()

    def _page(self, answer: Answer, count: int) -> None:
        fleet, taken = self.run.fleet, answer.taken
        assert taken is not None
        page = taken.placements[answer.told : answer.told + count]
        answer.told += len(page)
        counts = fleet.pull_page(answer.pull, taken.incarnation, taken.sequence, page, self.run.now)
        if counts and answer.told < len(taken.placements):
            return
        if counts:
            fleet.end_pull(answer.pull, self.run.now)
        answer.told = -1
        self.answers = [other for other in self.answers if other is not answer]


FleetMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=50)
TestFleet = FleetMachine.TestCase


class Walk:
    """Longer runs in which faults are rare enough that snapshots, events and losses meet in their middle."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.machine = FleetMachine()
        self.machine.start(self.random.choice([2, 10**6]), self.random.choice([1, 10**6, 10**6]))
        for name in NAMES:
            self.machine.register(name)

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            self.machine.exact()
            self.machine.only_members_are_located()
        self.machine.teardown()

    def step(self) -> None:
        machine, pick = self.machine, self.random
        name, key, tier = pick.choice(NAMES), pick.choice(KEYS), pick.choice([L1, L1, L2])
        number = pick.randrange(1000)
        moves = {
            lambda: machine.store(name, [key], tier, 1 + number % 9): 20,
            lambda: machine.delete_what_it_has(name, number): 15,
            lambda: machine.clear(name, tier, happens=True): 1,
            lambda: machine.send(name, arrives=False): 15,
            lambda: machine.lose(name, told=number % 2 == 0): 5,
            lambda: machine.arrive(number, first=number % 8 > 0) if machine.wire else None: 20,
            self.all_arrive: 8,
            lambda: machine.arrive_again(number) if machine.sent else None: 3,
            lambda: machine.beat(name): 3,
            lambda: machine.wait(2.0): 6,
            lambda: machine.wait(31.0): 0.2,
            lambda: machine.restart_server(name, beats=number % 2 == 0): 0.5,
            lambda: machine.restart_coordinator(happens=True): 0.5,
            lambda: machine.ask_for_snapshots(answered=False): 10,
            lambda: machine.take_snapshot(number) if machine.answers else None: 10,
            lambda: self.page(number): 8,
            lambda: machine.snapshot_fails(number) if machine.answers else None: 0.5,
            lambda: machine.sweep(2): 3,
        }
        pick.choices(list(moves), list(moves.values()))[0]()

    def all_arrive(self) -> None:
        while self.machine.wire:
            self.machine.arrive(0, first=True)

    def page(self, number: int) -> None:
        if any(answer.taken for answer in self.machine.answers):
            self.machine.page_arrives(number, 1)


@pytest.mark.parametrize("seed", range(12))
def test_random_walks(seed):
    for walk in range(40):
        Walk(1000 * seed + walk).go(100)
