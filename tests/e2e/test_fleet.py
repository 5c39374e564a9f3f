"""Engines at two servers of a fleet: what one holds is a hit at the other, and to lose it costs only time."""

from __future__ import annotations

import importlib.util
import threading
from contextlib import contextmanager

import pytest

from e2e.harness import FOUND, SHELF, Answer, Server, engine
from kvwire.client import calls
from kvwire.v1 import coordinator_service_pb2, coordinator_service_pb2_grpc
from support.coordinator_process import coordinator_process
from support.hosts import two_hosts
from support.waiting import eventually

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed")

STEADY = ("--peer-deadline=2", "--peer-timeout=2", "--peer-connect=5")


class Fleet:
    """Servers `a` and `b` under one coordinator."""

    def __init__(self, coordinator, a, b):
        self.coordinator, self.a, self.b = coordinator, a, b

    def form(self):
        eventually(lambda: all(each.status().sharing.peers for each in (self.a, self.b)))

    def learn(self):
        """Until the coordinator knows what `a` holds."""
        eventually(lambda: self._placements("a") >= self.a.status().memory.chunks)

    def _placements(self, name):
        stub = coordinator_service_pb2_grpc.CoordinatorServiceStub(self.coordinator.channel())
        members = stub.ListServers(coordinator_service_pb2.ListServersRequest(), timeout=5).members
        return sum(each.placements for each in members if each.server.server_id == name)


@contextmanager
def fleet(folder, *, flags=None, prefixes=None):
    """`flags` and `prefixes` by server's name, for those on hosts of their own."""
    servers = {}
    with coordinator_process(folder, "--heartbeat=0.2") as coordinator:
        try:
            for name in ("a", "b"):
                (folder / name).mkdir()
                joining = ("--server-id", name, "--coordinator", coordinator.address, *STEADY)
                own = (flags or {}).get(name, ())
                servers[name] = Server(folder / name, *joining, *own, prefix=(prefixes or {}).get(name, ()))
            made = Fleet(coordinator, **servers)
            made.form()
            yield made
        finally:
            for server in servers.values():
                server.close()


@pytest.fixture
def peer_chunks(monkeypatch):
    """Of the answer to each lookup of this process."""
    seen = []
    parse = calls._lookup_result

    def spy(reply, sent):
        seen.append(reply.peer_chunks)
        return parse(reply, sent)

    monkeypatch.setattr(calls, "_lookup_result", spy)
    return seen


def test_bl55_an_engine_finds_what_another_stored_at_another_server(
    short_tmp, engine_environment, baseline, peer_chunks
):
    """The same text, all of the hit from the other server; and of another tenant nothing."""
    prompts, salted = SHELF[:4], SHELF[4]
    right = baseline("gemma3", *prompts, salted)
    with fleet(short_tmp) as servers:
        with engine("gemma3", servers.a) as first:
            assert [answer.cached for answer in first.run(*prompts)] == [0] * 4
            assert first.run(salted, salt="t1")[0].cached == 0
        assert sum(peer_chunks) == 0
        servers.learn()
        with engine("gemma3", servers.b) as second:
            answers = second.run(*prompts)
            assert [answer.tokens for answer in answers] == right[:4]
            assert [answer.cached for answer in answers] == FOUND
            assert sum(peer_chunks) == sum(FOUND) // 64
            assert servers.b.status().counters.peer_hit_tokens == sum(FOUND)
            tenants = [second.run(salted, salt=salt)[0] for salt in ("t2", None, "t1")]
            assert tenants == [Answer(right[4], cached, "length") for cached in (0, 0, 128)]
        for server in (servers.a, servers.b):
            server.assert_at_rest()


def lose(server, link, how):
    """In the middle of what goes over the cable: its process is stopped and then killed, or it is pulled."""
    before = link.moved_bytes
    eventually(lambda: link.moved_bytes - before > 50_000, every=0.002)
    if how == "cable":
        link.cut()
        return
    server.pause()
    server.kill()
    link.quality.rate = 0.0


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["killed", pytest.param("cable", marks=pytest.mark.long)])
def test_a_server_is_lost_while_it_sends_to_another(
    how, short_tmp, engine_environment, baseline, peer_chunks
):
    """The engine computes what did not come, and its server is whole: what it held for it comes back."""
    prompts = SHELF[:4]
    right = baseline("gemma3", *prompts)
    with two_hosts() as (near, far, link):
        flags = {
            name: (
                f"--listen={address}",
                f"--advertise={address}",
                "--insecure-bind",
                "--prefetch-deadline=2",
            )
            for name, address in (("a", "10.77.0.1:7470"), ("b", "10.77.0.2:7470"))
        }
        prefixes = {"a": near.prefix, "b": far.prefix}
        inline = {"data_path": "inline"}  # the engine is on neither host
        with fleet(short_tmp, flags=flags, prefixes=prefixes) as servers:
            with engine("gemma3", servers.a, extra=inline) as first:
                first.run(*prompts)
            servers.learn()
            with engine("gemma3", servers.b, extra=inline) as second:
                link.quality.rate = 200e3
                loser = threading.Thread(target=lose, args=(servers.a, link, how))
                loser.start()
                answers = second.run(*prompts)
                loser.join()
                assert [answer.tokens for answer in answers] == right
                assert sum(answer.cached for answer in answers) < sum(FOUND)
                eventually(lambda: not servers.b.status().memory.reserved_bytes, within=60)
                servers.b.assert_at_rest()
                # What was still expected from the other server when it was computed was not stored.
                assert [answer.tokens for answer in second.run(*prompts)] == right
                assert second.run(*prompts) == [
                    Answer(tokens, cached, "length") for tokens, cached in zip(right, FOUND, strict=True)
                ]
