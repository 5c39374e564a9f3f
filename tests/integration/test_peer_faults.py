"""Servers that read from each other, and everything that goes wrong on the way: a shorter hit, never more."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import os
import signal
import threading
import time

import pytest

from kvwire.server.peers import loans, receiving
from kvwire.transfer import tags
from kvwire.transfer.shm import sweep_dead
from kvwire.transfer.ucx_path import DEFAULT_PIECE_BYTES
from support.coordinator_process import coordinator_process
from support.fleet import fleet, untouched
from support.raw_client import RawClient, content, tokens
from support.server_process import server_process
from support.waiting import eventually

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed")

PATHS = ("ucx-local", "ucx-remote")
BIG = 4 << 20


@pytest.fixture(params=PATHS)
def path(request):
    return request.param


def right(client, prompt: bytes) -> list[bytes]:
    return [content(key) for key in client.keys(prompt)]


@contextlib.contextmanager
def before_receiving(monkeypatch, act, *, times: int = 1):
    """Run `act` when a lease has been given and nothing has been received of it."""
    left = [times]
    begin = receiving.Receiving.__init__

    def begin_late(self, *args, **fields):
        if left[0]:
            left[0] -= 1
            act()
        begin(self, *args, **fields)

    monkeypatch.setattr(receiving.Receiving, "__init__", begin_late)
    yield
    monkeypatch.setattr(receiving.Receiving, "__init__", begin)


# The owner is another run, or gone


def test_bl46_an_owner_restarted_between_hint_and_call_is_refused_and_works_right_after(short_tmp, path):
    with fleet(short_tmp, "a", "b", data_paths=("shm", path)) as made:
        b, first, second = made.client("b"), tokens(4, seed=1), tokens(4, seed=2)
        made.store("a", first)
        assert b.lookup("warm", first).peer_chunks == 4
        b.end_session("warm")
        third = tokens(4, seed=3)
        made.store("a", third)
        b_sharing, former = made.sharing("b"), made.sharing("b").members.find
        info = made.servers["b"].run(made.sharing("b").members.latest)[0]
        made.stop("a")
        # The hint is still the former run's, and so is what is known of the fleet.
        b_sharing.members.find = lambda place: info if place == info.place else former(place)
        b_sharing.members.latest = lambda: [info]
        old_locate = b_sharing.directory.locate
        made.start("a", wait=False)

        async def locate(keys, _until):
            return [(info.place,)] * len(keys)

        b_sharing.directory.locate = locate
        assert b.lookup("stale", third).hit_chunks == 0
        assert "another run" in b_sharing.standing.problem(info.place)
        eventually(lambda: made.calls("a", "LookupAndLease") == 1)
        # It is asked no more for what its former run had; the new run is, with nothing of b started anew.
        assert b.lookup("stale again", third).hit_chunks == 0
        assert made.calls("a", "LookupAndLease") == 1
        b_sharing.directory.locate = old_locate
        del b_sharing.members.find, b_sharing.members.latest
        made.acquainted()
        made.store("a", second)
        assert b.lookup("new", second).peer_chunks == 4
        b.end_session("new")
        assert b.retrieve("again", second) == right(b, second)
        made.check()


def test_bl46_an_owner_restarted_in_mid_transfer_gives_nothing_of_its_former_run(
    short_tmp, path, monkeypatch
):
    with fleet(short_tmp, "a", "b", data_paths=("shm", path), prefetch_deadline=2.0) as made:
        b, prompt = made.client("b"), tokens(6)
        made.store("a", prompt)
        restarted = threading.Event()

        def restart() -> None:
            made.stop("a")
            made.start("a", wait=False)
            restarted.set()

        original = loans.Loan._move

        async def move(self, *args):
            if not restarted.is_set():
                await asyncio.to_thread(restart)
            await original(self, *args)

        monkeypatch.setattr(loans.Loan, "_move", move)
        assert b.lookup("r", prompt).hit_chunks == 0
        eventually(restarted.is_set)
        eventually(lambda: untouched(made.servers["b"]))
        b.end_session("r")
        made.acquainted()
        other = tokens(4, seed=5)
        made.store("a", other)
        assert b.lookup("s", other).peer_chunks == 4
        b.end_session("s")
        assert b.retrieve("again", other) == right(b, other)
        made.check()


# The lease


@pytest.mark.parametrize("chunks", [1, 6], ids=["single", "batch"])
def test_bl47_a_lease_that_ended_while_the_bytes_were_on_their_way_is_no_hit(
    short_tmp, path, chunks, monkeypatch
):
    with fleet(short_tmp, data_paths=("shm", path), l1_size=2 << 20) as made:
        made.start("a", read_lease=0.3)
        made.start("b")
        b, prompt = made.client("b"), tokens(chunks)
        made.store("a", prompt)

        def refill() -> None:
            time.sleep(0.5)
            for seed in range(10, 20):
                made.client("a").store(f"s{seed}", tokens(4, seed))

        wait = loans.Loan._wait

        async def wait_long(self, *args):
            await wait(self, *args)
            await asyncio.to_thread(refill)

        monkeypatch.setattr(loans.Loan, "_wait", wait_long)
        assert b.lookup("r", prompt).hit_chunks == 0
        assert made.peer("b", "a").failed_transfers >= 1
        monkeypatch.setattr(loans.Loan, "_wait", wait)
        eventually(lambda: untouched(made.servers["b"]) and untouched(made.servers["a"]))
        made.check()


def test_bl47_memory_under_a_running_transfer_is_not_reused(short_tmp, monkeypatch):
    """The copy begins when the lease is over: what comes is what was leased, or nothing."""
    with fleet(short_tmp, data_paths=("shm", "ucx-local"), l1_size=2 << 20) as made:
        made.start("a", read_lease=0.3)
        made.start("b")
        b, prompt = made.client("b"), tokens(6)
        made.store("a", prompt)

        with before_receiving(monkeypatch, lambda: time.sleep(0.5)):
            assert b.lookup("r", prompt).hit_chunks == 0
        eventually(lambda: untouched(made.servers["b"]) and untouched(made.servers["a"]))
        made.check()


# The way


def test_a_way_within_the_host_that_moves_nothing_is_left_for_the_one_between_hosts(short_tmp):
    paths = ("shm", "ucx-local", "ucx-remote")
    with fleet(short_tmp, "a", "b", data_paths=paths, write_lease=0.5, prefetch_deadline=5.0) as made:
        b, prompt = made.client("b"), tokens(4)
        made.store("a", prompt)
        a = made.servers["a"]
        local = a.core.plane.paths["ucx-local"]
        send, sending = type(local).send_peer, []

        def lose(peer, lease_id, transfer_id, slots):
            sending.append(lease_id)
            other = transfer_id % 1000 + 1
            return dataclasses.replace(
                send(local, peer, lease_id, other, slots),
                first_tags=tags.first_tags(
                    tags.Kind.PEER, transfer_id, [each.size for each in slots], DEFAULT_PIECE_BYTES
                ),
            )

        local.send_peer = lose
        assert b.lookup("r", prompt).hit_chunks == 0
        assert len(sending) == 1
        eventually(lambda: b.lookup("again", prompt).peer_chunks == 4)
        assert len(sending) == 1
        b.end_session("again")
        assert b.retrieve("once more", prompt) == right(b, prompt)
        eventually(lambda: untouched(made.servers["b"]))


# The directory


def test_hints_work_while_the_coordinator_is_dead(short_tmp):
    with fleet(short_tmp, "a", "b", data_paths=("shm", "ucx-local"), peer_deadline=0.1) as made:
        b, prompt = made.client("b"), tokens(4)
        made.store("a", prompt)
        assert b.lookup("r", prompt).peer_chunks == 4
        b.end_session("r")
        made.servers["b"].run(made.servers["b"].engine.clear)
        made.coordinator.__exit__()
        eventually(lambda: not made.servers["b"].run(made.servers["b"].core.fleet.stubs))
        assert b.lookup("s", prompt).peer_chunks == 4
        assert made.sharing("b").directory.counters.failures >= 1
        assert b.lookup("t", tokens(4, seed=9)).hit_chunks == 0


def test_a_coordinator_that_hangs_costs_its_deadline(short_tmp):
    with (
        coordinator_process(short_tmp, "--heartbeat=0.2", stop=False) as coordinator,
        fleet(short_tmp, coordinator=coordinator, data_paths=("shm", "ucx-local")) as made,
    ):
        made.start("a")
        made.start("b", peer_deadline=0.05)
        os.kill(coordinator.pid, signal.SIGSTOP)
        try:
            assert made.client("b").lookup("miss", tokens(4, seed=3)).hit_chunks == 0
            assert made.sharing("b").directory.counters.failures == 1
        finally:
            os.kill(coordinator.pid, signal.SIGCONT)
            coordinator.kill()


def test_wrong_bytes_are_found_by_their_checksum(short_tmp, path):
    with fleet(short_tmp, "a", "b", data_paths=("shm", path)) as made:
        b, prompt = made.client("b"), tokens(4)
        made.store("a", prompt)
        a = made.servers["a"]
        key = b.keys(prompt)[2]

        def damage() -> None:
            stored = a.engine.store.get(key).shards[0]
            eventually(lambda: True)
            stored.checksum = bytes(16)

        a.run(damage)
        assert b.lookup("r", prompt).hit_chunks == 2
        assert made.peer("b", "a").failed_transfers == 1
        eventually(lambda: untouched(made.servers["b"]))


# Processes that die or hang


@contextlib.contextmanager
def process(made, name: str, *flags: str):
    folder = made.folder / name
    folder.mkdir()
    settings = [
        f"--server-id={name}",
        f"--coordinator={made.coordinator.address}",
        "--chunk-size=4",
        "--l1-size=160MiB",
        "--sweep-interval=0.1",
        "--event-interval=0.005",
        "--ucx-net-devices=lo",
        "--peer-deadline=2",
        *flags,
    ]
    with server_process(folder, *settings, stop=False) as server:
        client = RawClient(server.channel()).register("shm", object_bytes=BIG)
        try:
            yield server, client
        finally:
            client.let_go()
    sweep_dead()  # as the next server would: one that was killed has left its memory


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_an_owner_that_dies_or_hangs_in_mid_transfer_costs_its_own_transfers_only(
    short_tmp, path, fault, monkeypatch
):
    settings = {"data_paths": ("shm", path), "l1_size": 160 << 20, "write_lease": 1.0}
    with (
        fleet(short_tmp, "b", "c", **settings) as made,
        process(made, "a", f"--data-paths=shm,{path}") as (owner, at_owner),
    ):
        prompt, other = tokens(8, seed=1), tokens(2, seed=2)
        b = made.client("b", object_bytes=BIG)
        made.client("c", object_bytes=BIG)
        at_owner.store("s", prompt)
        eventually(lambda: made.located(prompt).get("a") == 8)
        eventually(lambda: any(each.server_id == "a" for each in made.sharing("b").members.latest()))
        made.store("c", other)
        with before_receiving(monkeypatch, lambda: os.kill(owner.pid, fault)):
            hit = b.lookup("r", prompt).hit_chunks
        assert hit < 8
        # What comes from elsewhere comes as ever.
        assert b.lookup("t", other).peer_chunks == 2
        b.end_session("r", "t")
        assert b.retrieve("again", other) == [content(key, BIG) for key in b.keys(other)]
        eventually(lambda: untouched(made.servers["b"]), within=15)
        made.check()
        os.kill(owner.pid, signal.SIGCONT)


def test_a_requester_that_is_killed_in_mid_transfer_holds_no_memory_for_ever(short_tmp, path):
    with (
        fleet(short_tmp, "a", data_paths=("shm", path), l1_size=160 << 20, read_lease=0.5) as made,
        process(made, "b", f"--data-paths=shm,{path}") as (requester, at_requester),
    ):
        prompt = tokens(16, seed=1)
        a = made.client("a", object_bytes=BIG)
        made.store("a", prompt)
        lender = made.sharing("a").lender
        send = lender._send

        def send_and_kill(*args):
            opened = send(*args)
            requester.kill()
            return opened

        lender._send = send_and_kill
        with pytest.raises(Exception, match="UNAVAILABLE"):
            at_requester.lookup("r", prompt)
        owner = made.servers["a"]
        eventually(lambda: untouched(owner), within=15)
        assert owner.status().l1.evictable_bytes == owner.status().l1.used_bytes
        assert a.lookup("still", prompt).hit_chunks == 16
        made.check()
