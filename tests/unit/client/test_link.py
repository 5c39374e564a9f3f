from __future__ import annotations

import logging
import os
import threading
import time

import pytest

from kvwire import errors
from kvwire.client import Client, GroupKind, KvGroup, KvLayout, Registration, Role, SessionRange, TransferItem
from kvwire.client.health import loops
from kvwire.client.link import Link
from kvwire.keys import Namespace
from support.fake_server import fake_server

LAYOUT = KvLayout((KvGroup(GroupKind.FULL_ATTENTION, 4, 2, 64, 2),))
DEADLINES = {"Ping": 0.2, "Lookup": 0.3, "NegotiateChunkSize": 0.5, "RegisterKvCache": 0.5, "Attach": 0.5}

pytestmark = pytest.mark.leakcheck("threads")


class Scheduler:
    """Registers anew each time, as a scheduler does."""

    def __init__(self):
        self.client_id = os.urandom(16)
        self.chunk_sizes = []
        self.is_closed = False
        self.times_lost = 0

    def register(self, client, chunk_size):
        self.chunk_sizes.append(chunk_size)
        what = Registration(self.client_id, "e", Role.SCHEDULER, Namespace("m"), LAYOUT, chunk_size)
        return client.register(what).registration_id

    def lost(self):
        self.times_lost += 1

    def closed(self):
        self.is_closed = True


def eventually(check, seconds=5.0):
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, "it did not come true in time"
        time.sleep(0.01)


def heartbeat_threads(address) -> int:
    return sum(thread.name == f"kvwire-health {address}" for thread in threading.enumerate())


@pytest.fixture
def server(socket_path):
    with fake_server(f"unix:{socket_path}") as running:
        yield running


@pytest.fixture
def make(server):
    made = []

    def link(interval=0.1, alignment=4, **options):
        client = Client(server.address, deadlines=DEADLINES)
        made.append(Link(client, alignment, Scheduler(), interval=interval, **options))
        return made[-1]

    yield link
    for each in made:
        each.close()


def test_bl32_no_monitor_is_not_healthy(server, make):
    link = make()
    assert not link.is_healthy
    assert not link.is_usable
    assert "not been reached" in link.degraded_reason
    link.start()
    assert link.is_healthy
    assert link.degraded_reason == ""
    assert server.registrations


def test_bl32_one_loop_per_server_however_many_clients(server, make, short_tmp):
    links = [make(), make(), make()]
    for link in links:
        link.start()
    with fake_server(f"unix:{short_tmp}/other") as other:
        client = Client(other.address, deadlines=DEADLINES)
        elsewhere = Link(client, 4, Scheduler(), interval=0.1)
        elsewhere.start()
        assert heartbeat_threads(server.address) == 1
        assert heartbeat_threads(other.address) == 1
        elsewhere.close()
        assert heartbeat_threads(other.address) == 0
    links[0].close()
    links[1].close()
    assert heartbeat_threads(server.address) == 1
    eventually(lambda: links[2].is_healthy)
    links[2].close()
    assert heartbeat_threads(server.address) == 0
    assert not loops._loops


def test_bl32_clean_stop_before_the_first_use_and_twice(server, make):
    link = make()
    link.close()
    link.close()
    assert link._registrar.is_closed
    assert not link.is_healthy
    with pytest.raises(errors.Unavailable, match="closed"):
        link.ensure()


def test_bl31_heartbeats_run_without_traffic(server, make):
    make(interval=0.05).start()
    eventually(lambda: server.calls["Ping"] >= 3)


def test_bl31_a_forgotten_client_registers_again(server, make):
    link = make(interval=30)
    link.start()
    before = link.registration_id
    server.drop_registrations()
    # The stream says it at once; no heartbeat is due for half a minute.
    eventually(lambda: link.is_healthy and link.registration_id != before)
    assert link.registration_id in server.registrations


def test_recovery_is_negotiate_verify_register_attach_in_this_order(server, make):
    link = make(interval=30)
    link.start()
    order = []
    enter = server._enter
    server._enter = lambda method, *rest: (order.append(method), enter(method, *rest))
    server.restart()
    eventually(lambda: link.is_healthy and link._incarnation == server.incarnation)
    relevant = [method for method in order if method != "Ping"]
    assert relevant == ["NegotiateChunkSize", "RegisterKvCache", "Attach"]


def test_a_server_is_told_the_only_size_that_can_be_used(server, make):
    link = make(interval=0.05)
    link.start()
    server.restart()
    eventually(lambda: link.is_healthy and link._incarnation == server.incarnation)
    expected = [request.expected_chunk_size for request in server.requests["NegotiateChunkSize"]]
    assert expected[0] == 0
    assert set(expected[1:]) == {8}


def test_an_outage_degrades_at_once_and_heals_at_the_next_heartbeat(server, make):
    link = make(interval=0.2)
    link.start()
    server.stop()
    eventually(lambda: not link.is_usable, 1.0)
    assert link.degraded_reason
    server.start()
    eventually(lambda: link.is_healthy, 2.0)


def test_what_waits_for_a_server_is_told_once_that_it_is_lost(server, make):
    link = make()
    link.start()
    for outages in (1, 2):
        assert link._registrar.times_lost == outages - 1
        server.stop()
        eventually(lambda: not link.is_usable)
        calls = len(link._registrar.chunk_sizes)
        time.sleep(0.3)
        assert link._registrar.times_lost == outages
        assert len(link._registrar.chunk_sizes) == calls
        server.start()
        eventually(lambda: link.is_healthy)


def test_a_server_that_comes_back_with_another_chunk_size_stays_unused(server, make, caplog):
    link = make(interval=0.05)
    link.start()
    server.chunk_size = 16
    with caplog.at_level(logging.WARNING, "kvwire"):
        server.restart()
        eventually(lambda: "--chunk-size 8" in link.degraded_reason)
        tried = server.calls["NegotiateChunkSize"]
        eventually(lambda: server.calls["NegotiateChunkSize"] > tried + 2)
    assert not link.is_usable
    assert not server.registrations
    told = [record for record in caplog.records if "--chunk-size 8" in record.getMessage()]
    assert len(told) == 1
    server.chunk_size = 8
    eventually(lambda: link.is_healthy)


def test_a_failed_step_is_tried_again_at_the_next_heartbeat(server, make):
    link = make(interval=0.05)
    link.start()
    server.fail["RegisterKvCache"] = errors.LayoutConflict("Another engine is here.")
    server.drop_registrations()
    eventually(lambda: "Another engine" in link.degraded_reason)
    tried = server.calls["RegisterKvCache"]
    eventually(lambda: server.calls["RegisterKvCache"] > tried + 1)
    assert not link.is_usable
    server.fail.clear()
    eventually(lambda: link.is_healthy)


def test_a_start_that_fails_says_why_and_heals_later(server, make):
    server.fail["NegotiateChunkSize"] = errors.BindingIncomplete("Wait.")
    link = make(interval=0.05)
    link.start()
    with pytest.raises(errors.BindingIncomplete):
        link.require()
    assert link.degraded_reason == "Wait."
    server.fail.clear()
    eventually(lambda: link.is_healthy)


def test_any_reply_of_another_incarnation_starts_recovery(server, make):
    link = make(interval=30)
    link.start()
    # The connection stays: only the reply tells.
    server.incarnation = os.urandom(16)
    link.client.ping()
    assert not link.is_usable
    eventually(lambda: link.is_healthy)
    assert link._incarnation == server.incarnation
    assert server.calls["RegisterKvCache"] == 2


def test_bl32_a_hanging_server_costs_one_deadline_and_then_nothing(server, make):
    link = make(interval=30)
    link.start()
    for method in ("Ping", "Lookup", "NegotiateChunkSize"):
        server.hold[method] = threading.Event()
    start = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded) as caught:
        link.client.lookup(Namespace("m"), range(8))
    link.report(caught.value)
    assert time.monotonic() - start < 1.0
    start = time.monotonic()
    for _ in range(100):
        with pytest.raises(errors.Unavailable):
            link.ensure()
    assert time.monotonic() - start < 0.1
    eventually(lambda: "Ping" in link.degraded_reason)
    assert not link.is_usable
    for event in server.hold.values():
        event.set()
    link._wake()
    eventually(lambda: link.is_healthy)


def test_calls_in_flight_end_when_the_server_does_not_answer_pings(server, make):
    link = make(interval=0.1)
    link.start()
    server.hold["BeginStore"] = threading.Event()
    ended = []

    def work():
        with pytest.raises(errors.Unavailable):
            link.client.begin_store(link.registration_id, [TransferItem(SessionRange("s", 0, 1))])
        ended.append(time.monotonic())

    worker = threading.Thread(target=work)
    worker.start()
    eventually(lambda: server.calls["BeginStore"] == 1)
    server.hold["Ping"] = threading.Event()
    start = time.monotonic()
    worker.join(5)
    assert ended
    assert ended[0] - start < 2.0
    for event in server.hold.values():
        event.set()
    eventually(lambda: link.is_healthy)


def test_a_single_slow_call_costs_no_registration(server, make):
    link = make(interval=30)
    link.start()
    registration = link.registration_id
    link.report(errors.DeadlineExceeded("slow"))
    assert not link.is_usable
    eventually(lambda: link.is_healthy)
    assert link.registration_id == registration
    assert server.calls["RegisterKvCache"] == 1


def test_one_late_ping_is_no_outage(server, make):
    link = make(interval=0.1)
    link.start()
    server.delay["Ping"] = 0.3
    eventually(lambda: server.calls["Ping"] >= 1)
    server.delay.clear()
    eventually(lambda: server.calls["Ping"] >= 4)
    assert server.calls["RegisterKvCache"] == 1


def test_errors_of_the_request_cast_no_doubt_on_the_server(server, make):
    link = make(interval=30)
    link.start()
    for error in (errors.SessionUnknown("x"), errors.OutOfSpace("x"), errors.InvalidArgument("a", "b")):
        link.report(error)
    assert link.is_usable


def test_closing_unregisters_and_ends_the_stream(server, make):
    link = make()
    link.start()
    assert len(server.registrations) == 1
    start = time.monotonic()
    link.close()
    assert not server.registrations
    assert time.monotonic() - start < 1.0


def test_closing_does_not_wait_for_a_hanging_server(server, make):
    link = make(interval=0.05)
    link.start()
    for method in ("Ping", "UnregisterKvCache", "NegotiateChunkSize"):
        server.hold[method] = threading.Event()
    eventually(lambda: server.calls["Ping"] >= 1)
    start = time.monotonic()
    link.close()
    assert time.monotonic() - start < 2.0


def test_a_closed_link_does_not_come_back(server, make):
    link = make(interval=0.05)
    link.start()
    link.close()
    link.heartbeat()
    link.report(errors.NotRegistered("x"))
    assert not link.is_usable
    assert link.degraded_reason == "the client is closed"


def test_a_start_does_not_wait_longer_than_told(server, make):
    server.hold["RegisterKvCache"] = threading.Event()
    link = make()
    start = time.monotonic()
    link.start(wait=0.2)
    assert time.monotonic() - start < 0.45
    assert not link.is_usable
    with pytest.raises(errors.Unavailable, match="not been reached"):
        link.require()


def test_bl61_a_child_starts_anew(server, make):
    """What a child does after a fork, without one: everything is forgotten, and the first use connects."""
    link = make(interval=30)
    link.start()
    parents, stream, loop = link.registration_id, link._attach, link._loop
    link.after_fork()
    assert not link.is_usable
    assert link.registration_id == 0
    link.ensure()
    assert link.registration_id != parents
    assert link.is_healthy
    stream.cancel()
    loop.remove(link)


def test_what_is_renewed_while_it_is_being_set_up_is_set_up_again(server, make):
    """An engine's memory may come in the middle of an attempt that knows nothing of it."""
    link = make(interval=30)
    registrar, inside, go = link._registrar, threading.Event(), threading.Event()
    plain = registrar.register

    def slow(client, chunk_size):
        found = plain(client, chunk_size)
        inside.set()
        assert go.wait(5)
        return found

    registrar.register = slow
    link.start(0)
    assert inside.wait(5)
    threading.Timer(0.1, go.set).start()
    link.renew("there is more now", 10)
    assert link.is_healthy
    assert len(registrar.chunk_sizes) == 2
    assert len(server.registrations) == 1
    assert link.registration_id in server.registrations


def test_a_fault_of_a_layout_degrades_and_does_not_end_the_loop(server, make):
    link = make(interval=0.05)
    link.start()
    register = link._registrar.register

    def faulty(client, chunk_size):
        if chunk_size:
            raise ZeroDivisionError("of the layout")

    link._registrar.register = faulty
    server.drop_registrations()
    eventually(lambda: "ZeroDivisionError" in link.degraded_reason)
    link._registrar.register = register
    eventually(lambda: link.is_healthy)
