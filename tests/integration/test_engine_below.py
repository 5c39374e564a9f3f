"""An engine whose prompts lie below its server's memory: its scheduler never waits, what comes is right."""

from __future__ import annotations

import asyncio

import pytest

from kvwire.client import DEADLINES
from kvwire.server.config import ServerConfig
from kvwire.server.fetch.planning import shards_of
from kvwire.server.fetch.service import MARGIN_S
from support.fake_engine import Request
from support.fake_source import FakeSource
from support.local_server import local_server
from support.mini_engine import MiniEngine
from support.waiting import eventually

PROMPT = [*range(64)]


@pytest.fixture
def local(short_tmp):
    with local_server(short_tmp, chunk_size=16, l1_size=16 << 20) as started:
        yield started


@pytest.fixture
def engine(local):
    made = MiniEngine(local.address, world_size=2)
    yield made
    made.close()


def sink(local) -> FakeSource:
    """What is in memory lies in a tier from now on, and not in memory any more."""
    source = FakeSource()

    def take():
        local.core.absorb()
        for chunk in local.engine.store.chunks():
            for shard in shards_of(chunk.mask):
                stored = chunk.shards[shard]
                source.copies[chunk.key, shard] = bytes(local.core.arena.view(stored.offset, stored.size))
        source.objects = set(source.copies)
        local.core.prefetcher.add(source)
        return local.engine.clear()

    eventually(lambda: not local.run(local.engine.status).leases["lookup"])
    dropped, kept = local.run(take)
    assert dropped
    assert not kept
    return source


def test_what_lies_below_is_loaded_and_right(local, engine):
    engine.run(PROMPT)
    source = sink(local)
    ran = engine.run([*PROMPT, 7, 8, 9])
    assert ran.external == 64
    assert not ran.failed
    assert engine.is_right(ran)
    assert len(source.fetched) == 8
    assert local.status().counters.l2_hit_tokens == 64


def test_a_scheduler_does_not_wait_for_what_is_brought(local, engine):
    engine.run(PROMPT)
    source = sink(local)
    source.gate = local.run(asyncio.Event)
    slow, quick = Request("slow", [*PROMPT, 7]), Request("quick", [1] * 40)
    assert engine.scheduler.matched_tokens(slow, 0) is None
    eventually(lambda: source.begun)
    # Others are answered meanwhile, and computed.
    assert engine.ask(quick) == 0
    assert engine.is_right(engine.run([5] * 40))
    assert engine.scheduler.matched_tokens(slow, 0) is None
    local.run(source.gate.set)
    assert engine.ask(slow) == 64


def test_what_does_not_come_is_computed(local, engine):
    engine.run(PROMPT)
    source = sink(local)
    source.damaged = {name for name in source.objects if name[1] == 1}
    ran = engine.run([*PROMPT, 7, 8, 9])
    assert ran.external == 0
    assert engine.is_right(ran)
    assert local.status().counters.l2_hit_tokens == 0


def test_a_request_that_ends_while_its_lookup_waits_leaves_nothing(local, engine):
    engine.run(PROMPT)
    source = sink(local)
    source.gate = local.run(asyncio.Event)
    request = Request("gone", [*PROMPT, 7])
    assert engine.scheduler.matched_tokens(request, 0) is None
    eventually(lambda: source.begun)
    engine.scheduler.finished(request)
    local.run(source.gate.set)
    eventually(lambda: not local.core.prefetcher.under_way)
    eventually(lambda: not local.status().leases["lookup"])
    eventually(lambda: not local.status().sessions)
    local.check()


def test_clients_are_more_patient_than_a_server_lets_a_lookup_wait():
    assert DEADLINES["Lookup"] > ServerConfig().prefetch_deadline + MARGIN_S
