"""Lookups at a real server that has something to bring from: calls, status, metrics, stopping, giving up."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest

from kvwire.cli.commands.status import print_status
from kvwire.client import Client
from kvwire.keys import Namespace
from kvwire.server.fetch.source import Origin
from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import cache_service_pb2 as pb
from kvwire.v1 import error_reason_pb2, namespace_pb2
from support.fake_source import FakeSource, content
from support.local_server import local_server
from support.raw_client import MODEL, OBJECT_BYTES, RawClient, failure, tokens
from support.waiting import eventually


def reason_of(reply) -> str:
    return error_reason_pb2.ErrorReason.Name(reply.error.reason).removeprefix("ERROR_REASON_")


class Site:
    """A server whose only tier and only peer are fakes, and a client of it."""

    def __init__(self, local) -> None:
        self.local = local
        self.near = FakeSource("disk", Origin.L2)
        self.far = FakeSource("peers", Origin.PEER)
        for source in (self.near, self.far):
            local.core.prefetcher.add(source)
        self.client = RawClient(local.channel()).register(object_bytes=OBJECT_BYTES)

    def have(self, source: FakeSource, chunks: int, but=()) -> list[bytes]:
        keys = self.client.keys(tokens(chunks))
        source.have(keys, but=[(keys[index], 0) for index in but])
        return keys

    def gate(self, source: FakeSource) -> asyncio.Event:
        source.gate = self.local.run(asyncio.Event)
        return source.gate

    def open(self, gate: asyncio.Event) -> None:
        self.local.run(gate.set)

    def settle(self) -> None:
        eventually(lambda: not self.local.core.prefetcher.under_way, every=0.002)
        self.local.check()
        store = self.local.engine.store
        assert (store.reserved_bytes, store.quarantined_bytes) == (0, 0)
        assert (self.near.held, self.far.held) == (0, 0)

    def prefetch(self, chunks: int, **fields) -> admin.PrefetchResponse:
        selector = admin.PromptSelector(
            namespace=namespace_pb2.Namespace(model=fields.pop("model", MODEL)), tokens=tokens(chunks)
        )
        return self.client.admin.Prefetch(
            admin.PrefetchRequest(selector=selector), timeout=fields.pop("timeout", 10)
        )


@pytest.fixture
def site(short_tmp):
    with local_server(short_tmp) as local:
        made = Site(local)
        yield made
        made.client.let_go()


def test_a_lookup_finds_what_lies_below_and_the_bytes_are_right(site):
    keys = site.have(site.near, 4)
    site.have(site.far, 6)
    reply = site.client.lookup("s", tokens(8))
    assert (reply.asked_chunks, reply.hit_chunks, reply.l2_chunks, reply.peer_chunks) == (8, 6, 4, 2)
    assert reply.hit_tokens == 24
    assert reply.lease_id
    result = site.client.begin_retrieve("s", 0, 6)
    assert [slot.checksum for slot in result.ticket.slots] != [b""] * 6
    data = site.client.read(result.ticket)
    assert data[:4] == [content((key, 0), OBJECT_BYTES) for key in keys]
    assert site.client.end_retrieve(result.ticket.lease_id)
    site.settle()


def test_hits_of_all_origins_and_misses_are_what_was_asked(site):
    site.client.store("before", tokens(2))
    site.have(site.near, 3)
    site.have(site.far, 5)
    site.client.lookup("s", tokens(7))
    site.client.lookup("s", tokens(7))
    counters = site.client.status().counters
    # The session that stored has missed 2 chunks.
    assert (counters.asked_tokens, counters.hit_tokens) == (36, 20)
    assert (counters.l2_hit_tokens, counters.peer_hit_tokens) == (4, 8)
    found = site.local.engine.counters
    assert found.asked_tokens == found.hit_tokens + found.miss_tokens


def test_people_see_where_hits_came_from(site, capsys):
    site.client.store("before", tokens(2))
    print_status(site.client.status())
    assert "lower tiers" not in capsys.readouterr().out
    site.have(site.near, 3)
    site.have(site.far, 5)
    with Client(site.local.address) as client:
        found = client.lookup(
            Namespace(MODEL),
            range(28),
            registration_id=site.client.registration_id,
            session_id="s",
        )
    assert (found.hit_chunks, found.l2_chunks, found.peer_chunks) == (5, 1, 2)
    print_status(site.client.status())
    assert "(8 in memory, 4 in lower tiers, 8 at other servers)" in capsys.readouterr().out


def test_only_looking_brings_nothing(site):
    site.have(site.near, 4)
    assert site.client.hits(tokens(4)) == 0
    assert not site.near.asked
    assert site.client.lookup("", tokens(4), registration_id=0).l2_chunks == 0


def test_a_lookup_answers_in_time_with_what_is_there_and_the_rest_comes(short_tmp):
    with local_server(short_tmp, prefetch_deadline=0.1) as local:
        site = Site(local)
        site.client.store("before", tokens(1))
        gate = site.gate(site.near)
        site.have(site.near, 4)
        reply = site.client.lookup("s", tokens(4))
        assert (reply.hit_chunks, reply.l2_chunks) == (1, 0)
        site.open(gate)
        site.settle()
        assert site.client.lookup("t", tokens(4)).hit_chunks == 4
        site.client.let_go()


def test_the_deadline_of_the_call_counts_too(site):
    site.client.store("before", tokens(1))
    gate = site.gate(site.near)
    site.have(site.near, 4)
    request = pb.LookupRequest(
        registration_id=site.client.registration_id,
        session_id="s",
        namespace=namespace_pb2.Namespace(model=MODEL),
        tokens=tokens(4),
    )
    assert site.client.stub.Lookup(request, timeout=0.6).hit_chunks == 1
    site.open(gate)
    site.settle()


@pytest.mark.parametrize("seconds", [0, 0.0])
def test_with_a_deadline_of_zero_lookups_bring_nothing(short_tmp, seconds):
    with local_server(short_tmp, prefetch_deadline=seconds) as local:
        site = Site(local)
        site.have(site.near, 4)
        assert site.client.lookup("s", tokens(4)).hit_chunks == 0
        assert not site.near.asked
        assert site.prefetch(4).resident_chunks == 4
        site.client.let_go()


def test_other_calls_are_served_while_a_lookup_waits(site):
    gate = site.gate(site.near)
    site.have(site.near, 4)
    replies = []
    waiting = threading.Thread(target=lambda: replies.append(site.client.lookup("s", tokens(4))))
    waiting.start()
    eventually(lambda: site.near.begun, every=0.002)
    other = RawClient(site.local.channel(), "other").register()
    assert other.store("x", tokens(3, seed=4)) == 3
    assert site.client.ping().draining is False
    # Another session wants a part of the same, and stores what follows.
    assert other.begin_store("none", 0, 1).error.reason
    site.open(gate)
    waiting.join()
    assert replies[0].hit_chunks == 4
    site.settle()


def test_lookups_that_wait_keep_nobody_out(short_tmp):
    with local_server(short_tmp, max_in_flight=3, prefetch_deadline=5.0) as local:
        site = Site(local)
        gate = site.gate(site.near)
        site.have(site.near, 4)
        replies = []

        def ask(number):
            replies.append(site.client.lookup(f"s{number}", tokens(4)).hit_chunks)

        waiting = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for count, each in enumerate(waiting):
            each.start()
            eventually(lambda count=count: local.core.guard.waiting > count, every=0.002)
        # No more than that wait: the others answer with what is there.
        assert site.client.lookup("s3", tokens(4)).hit_chunks == 0
        assert site.client.lookup("other", tokens(3, seed=4)).asked_chunks == 3
        assert site.client.abort(site.client.begin_store("other", 0, 3).ticket.lease_id) == 3
        site.open(gate)
        for each in waiting:
            each.join()
        assert replies == [4, 4, 4]
        assert (local.core.guard.waiting, local.core.guard.in_flight) == (0, 0)
        site.settle()
        site.client.let_go()


def test_a_client_that_gives_up_leaves_no_lease_and_no_memory(site):
    site.client.store("before", tokens(2))
    gate = site.gate(site.near)
    site.have(site.near, 6)
    request = pb.LookupRequest(
        registration_id=site.client.registration_id,
        session_id="s",
        namespace=namespace_pb2.Namespace(model=MODEL),
        tokens=tokens(6),
    )
    call = site.client.stub.Lookup.future(request, timeout=10)
    eventually(lambda: site.near.begun, every=0.002)
    assert site.client.status().leases.lookup == 1
    call.cancel()
    eventually(lambda: not site.client.status().leases.lookup, every=0.002)
    site.open(gate)
    site.settle()
    assert site.local.run(site.local.engine.clear) == (6, 0)
    assert site.local.status().l1.used_bytes == 0


def test_a_session_that_ends_while_its_lookup_waits_gets_nothing(site):
    gate = site.gate(site.near)
    site.have(site.near, 4)
    replies = []
    waiting = threading.Thread(target=lambda: replies.append(site.client.lookup("s", tokens(4))))
    waiting.start()
    eventually(lambda: site.near.begun, every=0.002)
    assert site.client.end_session("s") == 1
    site.open(gate)
    waiting.join()
    assert (replies[0].hit_chunks, replies[0].lease_id) == (0, 0)
    assert not site.client.status().leases.lookup
    site.settle()


def test_a_client_that_unregisters_while_its_lookup_waits_is_told(site):
    gate = site.gate(site.near)
    site.have(site.near, 4)
    failures = []
    waiting = threading.Thread(target=lambda: failures.append(failure(site.client.lookup, "s", tokens(4))))
    waiting.start()
    eventually(lambda: site.near.begun, every=0.002)
    site.client.unregister()
    site.open(gate)
    waiting.join()
    assert failures[0].reason == "NOT_REGISTERED"
    assert not any(site.local.status().leases.values())
    site.settle()


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_server_that_stops_in_mid_fetch_leaves_nothing(short_tmp, stubborn):
    with local_server(short_tmp, drain=0.5) as local:
        site = Site(local)
        site.gate(site.near)
        if stubborn:
            site.near.stubborn = local.run(asyncio.Event)
        site.have(site.near, 4)
        replies = []

        def ask():
            try:
                replies.append(site.client.lookup("s", tokens(4)).hit_chunks)
            except grpc.RpcError as error:
                replies.append(error.code())

        waiting = threading.Thread(target=ask)
        waiting.start()
        eventually(lambda: site.near.begun, every=0.002)
        if stubborn:
            # It lets go only after a while, and what it writes then harms nobody.
            local._loop.call_soon_threadsafe(lambda: local._loop.call_later(0.8, site.near.stubborn.set))
        local.begin_stop()
        waiting.join()
        # It answers at once with what is there, rather than to make the stop wait.
        assert replies == [0]
        site.client.let_go()
    assert site.local.core.prefetcher.under_way == 0
    store = local.engine.store
    assert (store.reserved_bytes, store.quarantined_bytes) == (0, 0)
    assert site.near.held == 0


def test_stores_go_on_while_everything_is_brought_and_nothing_is_mixed_up(short_tmp):
    """Many sessions of several prompts at once over a memory that is too small for all of them."""
    with local_server(short_tmp, l1_size=1 << 20, prefetch_deadline=5.0) as local:
        site = Site(local)
        keys = {seed: site.client.keys(tokens(5, seed)) for seed in range(4)}
        for seed, each in keys.items():
            site.near.have(each[: 2 + seed])
            site.far.have(each)
        site.near.damaged.add((keys[3][1], 0))
        site.far.broken.add((keys[2][4], 0))

        def one(number):
            client = RawClient(local.channel(), f"engine-{number}").register()
            for turn in range(6):
                seed = (number + turn) % 4
                session = f"{number}-{turn}"
                hit = client.lookup(session, tokens(5, seed)).hit_chunks
                if hit:
                    result = client.begin_retrieve(session, 0, hit)
                    data = client.read(result.ticket)
                    good = client.end_retrieve(result.ticket.lease_id)
                    slots = [slot.chunk_index for slot in result.ticket.slots]
                    if good:
                        assert data == [content((keys[seed][i], 0), OBJECT_BYTES) for i in slots]
                client.end_session(session)
            client.let_go()

        threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        site.settle()
        site.client.let_go()


def test_prefetch_brings_a_prompt_and_tells_from_where(site):
    site.have(site.near, 2)
    site.have(site.far, 4)
    reply = site.prefetch(4)
    assert (reply.asked_chunks, reply.resident_chunks, reply.l2_chunks, reply.peer_chunks) == (4, 4, 2, 2)
    assert not reply.HasField("error")
    again = site.prefetch(4)
    assert (again.resident_chunks, again.l2_chunks, again.peer_chunks) == (4, 0, 0)
    assert site.client.hits(tokens(4)) == 4
    assert not site.client.status().leases.lookup
    assert site.local.run(site.local.engine.clear) == (4, 0)
    site.settle()


def test_prefetch_needs_no_engine_that_is_there_any_more(site):
    site.have(site.near, 3)
    site.client.store("before", tokens(1, seed=5))
    site.client.unregister()
    reply = site.prefetch(3)
    assert (reply.resident_chunks, reply.l2_chunks) == (3, 3)
    site.client.register()
    assert site.client.lookup("s", tokens(3)).hit_chunks == 3
    site.settle()


def test_prefetch_says_why_not_all_is_there(short_tmp):
    with local_server(short_tmp, l1_size=1 << 20) as local:
        site = Site(local)
        site.have(site.near, 3)
        reply = site.prefetch(5)
        assert (reply.asked_chunks, reply.resident_chunks) == (5, 3)
        assert reason_of(reply) == "OBJECT_NOT_FOUND"
        site.have(site.near, 40)
        reply = site.prefetch(40)
        assert 3 < reply.resident_chunks < 40
        assert reason_of(reply) == "OUT_OF_SPACE"
        local.run(local.engine.clear)
        gate = site.gate(site.near)
        reply = site.prefetch(4, timeout=0.5)
        assert reason_of(reply) == "DEADLINE_EXCEEDED"
        site.open(gate)
        site.settle()
        reply = site.prefetch(4, model="another")
        assert (reply.asked_chunks, reply.resident_chunks) == (4, 0)
        assert reason_of(reply) == "OBJECT_NOT_FOUND"
        site.client.let_go()
