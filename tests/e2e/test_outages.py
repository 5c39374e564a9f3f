"""The server dies, hangs, or cannot be reached any more, with a request at every stage of its way.

One engine goes through all stages: after each it has the right text, all its blocks, and a server that it
uses again by itself; and the server has nothing left of what was under way.
"""

from __future__ import annotations

import itertools
import time

import pytest

from e2e.harness import Server, engine, prompt, wait_until_healthy
from kvwire.client.deadlines import DEADLINES
from support.proxy import Proxy

LEASES = ("--lookup-lease", "3", "--read-lease", "3", "--write-lease", "3", "--sweep-interval", "0.1")
STAGES = ("looked up", "allocated", "half retrieved", "half stored")
KNOWN = [prompt(length, seed=length) for length in (300, 200, 137, 129)]


class Faults:
    """What is done to the server, and how it comes back."""

    def __init__(self, kind, server, proxy):
        self._server = server
        self._proxy = proxy
        self._kind = kind

    def strike(self):
        target = self._server if self._kind in {"kill", "pause"} else self._proxy
        getattr(target, self._kind)()

    def mend(self):
        if self._kind == "kill":
            self._server.start()
        elif self._kind == "pause":
            self._server.resume()
        else:
            self._proxy.heal()


@pytest.fixture
def cache(short_tmp, engine_environment):
    started = Server(short_tmp, *LEASES)
    yield started
    started.close()


@pytest.fixture
def wire(short_tmp, cache):
    with Proxy(short_tmp / "wire.sock", cache.address) as proxy:
        yield proxy


@pytest.mark.parametrize(
    ("kind", "path", "policy"),
    [
        ("kill", "shm", "recompute"),
        ("kill", "ucx", "fail"),
        ("kill", "inline", "recompute"),
        ("pause", "shm", "recompute"),
        ("pause", "ucx", "recompute"),
        ("pause", "inline", "fail"),
        ("cut", "inline", "recompute"),
        ("cut", "shm", "fail"),
        ("stall", "inline", "recompute"),
    ],
)
def test_a_request_at_every_stage(kind, path, policy, cache, wire, baseline, monkeypatch):
    fresh = [prompt(200, seed=3000 + stage) for stage in range(len(STAGES))]
    asked = [*KNOWN, *fresh]
    right = dict(zip(map(tuple, asked), baseline("gemma3", *asked), strict=True))
    faults = Faults(kind, cache, wire)
    # A server that hangs is found out by two pings: sixteen times here.
    monkeypatch.setattr("kvwire.client.deadlines.DEADLINES", {**DEADLINES, "Ping": 1.0})
    with engine("gemma3", wire, policy=policy, extra={"data_path": path}) as running:
        free = running.free_blocks()
        for stage, new in zip(STAGES, fresh, strict=True):
            assert hits(running, KNOWN, right)
            struck = strike_when(stage, running, faults, monkeypatch)
            begin = time.monotonic()
            answers = running.run(*KNOWN, new)
            assert time.monotonic() - begin < 25
            assert struck, stage
            for tokens, answer in zip([*KNOWN, new], answers, strict=True):
                failed = policy == "fail" and answer.reason == "error"
                assert failed or answer.tokens == right[tuple(tokens)], stage
            assert running.free_blocks() == free, stage
            monkeypatch.undo()
            faults.mend()
            wait_until_healthy(running)
            nothing_left(cache)
        assert hits(running, KNOWN, right)


def hits(running, prompts, right):
    """Whether all are found once they are stored, which is seen to."""
    for _ in range(2):
        answers = running.run(*prompts)
        assert [answer.tokens for answer in answers] == [right[tuple(tokens)] for tokens in prompts]
    return all(answer.cached for answer in answers)


def strike_when(stage, running, faults, monkeypatch):
    """Arranges for the fault at a stage of the next requests. The list that it returns tells when."""
    struck = []

    def strike():
        if not struck:
            struck.append(stage)
            faults.strike()

    if stage == "looked up":
        after(
            running.scheduler_connector,
            "get_num_new_matched_tokens",
            lambda told: told[0],
            strike,
            monkeypatch,
        )
    elif stage == "allocated":
        after(running.scheduler_connector, "update_state_after_alloc", lambda _: True, strike, monkeypatch)
    else:
        method, mover = ("read", "drain") if stage == "half retrieved" else ("write", "fill")
        in_the_middle(method, mover, strike, monkeypatch)
    return struck


def after(owner, name, wanted, strike, monkeypatch):
    real = getattr(owner, name)

    def call(*args, **kwargs):
        told = real(*args, **kwargs)
        if wanted(told):
            strike()
        return told

    monkeypatch.setattr(owner, name, call)


def in_the_middle(method, mover, strike, monkeypatch):
    """After the first object of a transfer has been copied, between it and the second one."""
    from kvwire.client.binding import LivePath

    real = getattr(LivePath, method)

    def move(self, ticket, copy, deadline):
        calls = itertools.count()

        def copy_and_strike(slot, start, stop, data):
            if next(calls) == 1 and len(ticket.slots) > 1:
                strike()
            copy(slot, start, stop, data)

        return real(self, ticket, copy_and_strike, deadline)

    monkeypatch.setattr(LivePath, method, move)


def nothing_left(server, within=15.0):
    """No lease, no memory that is taken for nothing, no session: once the leases' own times are over."""
    deadline = time.monotonic() + within
    while True:
        status = server.status()
        left = {
            "sessions": status.sessions,
            "leases": (status.leases.lookup, status.leases.read, status.leases.write),
            "reserved": status.memory.reserved_bytes,
            "quarantined": status.memory.quarantined_bytes,
            "clients": len(status.registrations) - 2,
        }
        if left == {**dict.fromkeys(left, 0), "leases": (0, 0, 0)}:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
