"""One engine of two ranks at two real servers: bytes, what one bad server costs, and recovery."""

from __future__ import annotations

import contextlib
import logging
import os
import signal

import pytest

from kvwire.client import Client
from kvwire.errors import ChunkSizeIncompatible
from support.rank_engine import BLOCK, CHUNK, SPACE, RankEngine, engine_layout, wait_until
from support.server_process import server_process

FLAGS = ("--chunk-size=64", "--l1-size=8MiB")


@pytest.fixture
def servers(short_tmp):
    with contextlib.ExitStack() as stack:
        running = []
        for name in "ab":
            (short_tmp / name).mkdir()
            running.append(stack.enter_context(server_process(short_tmp / name, *FLAGS, stop=False)))
        yield running
        for server in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGCONT)


@pytest.fixture
def make(servers):
    with contextlib.ExitStack() as stack:

        def engine(window=0, addresses=None, **options):
            addresses = addresses or [server.address for server in servers]
            made = RankEngine(addresses, engine_layout(window), **options)
            stack.callback(made.close)
            return made

        yield engine


def at_rest(address):
    with Client(address) as client:
        status = client.status()
    leases = status.leases
    busy = leases.lookup or leases.read or leases.write or status.memory.quarantined_bytes
    return not (busy or status.sessions or status.counters.surplus_releases)


def test_each_rank_gets_its_own_bytes_back_from_its_own_server(servers, make):
    engine = make()
    assert engine.scheduler.is_healthy
    assert engine.found("a", range(200)) == 0
    assert not any(each.failed for each in engine.store(engine.job("a", range(3))))
    assert engine.found("b", range(200)) == 192
    assert not any(each.failed for each in engine.load(engine.job("b", range(3), first_block=20)))
    for rank in engine.ranks:
        for layer in rank.kv[0]:
            assert (layer[20:32] == layer[:12]).all()
    assert not (engine.ranks[0].kv[0][0][20:32] == engine.ranks[1].kv[0][0][20:32]).all()
    for session in "ab":
        engine.scheduler.release_lookup(session)
        engine.scheduler.end_session(session)
    for server in servers:
        wait_until(lambda address=server.address: at_rest(address))


def test_chunks_that_no_lookup_has_named_are_found_under_the_same_keys(servers, make):
    from kvwire.keys import ChunkHasher, root

    engine = make()
    assert engine.found("a", range(64)) == 0
    hasher = ChunkHasher(root(SPACE, CHUNK), CHUNK)
    hasher.append(range(192))
    keys = tuple(hasher.keys)
    assert not any(each.failed for each in engine.store(engine.job("a", range(3), keys=keys)))
    assert engine.found("b", range(200)) == 192


def test_what_one_server_has_alone_is_no_hit_and_stays_for_later(servers, make):
    engine = make()
    engine.found("a", range(256))
    assert not any(each.failed for each in engine.store(engine.job("a", range(4)), ranks=[0]))
    assert not any(each.failed for each in engine.store(engine.job("a", range(2)), ranks=[1]))
    assert engine.found("b", range(256)) == 128
    assert not any(each.failed for each in engine.store(engine.job("b", range(2, 4)), ranks=[1]))
    assert engine.found("c", range(256)) == 256
    for session in "abc":
        engine.scheduler.release_lookup(session, 0, 1)
        engine.scheduler.release_lookup(session, 1)
        engine.scheduler.end_session(session)
    for server in servers:
        with Client(server.address) as client:
            wait_until(lambda client=client: not (client.status().sessions or client.status().leases.lookup))


def test_with_a_window_the_common_boundary_is_one_that_both_can_resume_at(servers, make):
    """Rank 0 lacks the window of the boundary that rank 1 ends at."""
    engine = make(window=BLOCK + 1)
    engine.found("a", range(256))
    for part in (engine.job("a", range(4), groups=[0]), engine.job("a", range(1), groups=[1])):
        assert not any(each.failed for each in engine.store(part, ranks=[0]))
    assert not any(each.failed for each in engine.store(engine.job("a", range(3, 4), groups=[1]), ranks=[0]))
    assert not any(each.failed for each in engine.store(engine.job("a", range(2)), ranks=[1]))
    engine.scheduler.end_session("a")
    assert engine.found("b", range(256)) == 64
    assert not any(each.failed for each in engine.load(engine.job("b", range(1), first_block=20)))
    engine.scheduler.release_lookup("b")
    engine.scheduler.end_session("b")
    for server in servers:
        wait_until(lambda address=server.address: at_rest(address))


def test_engines_that_name_the_servers_in_another_order_share_nothing(servers, make):
    engine = make()
    engine.found("a", range(64))
    engine.store(engine.job("a", range(1)))
    other = make(addresses=[server.address for server in reversed(servers)], name="other")
    assert other.scheduler.is_healthy
    assert other.found("b", range(64)) == 0
    alike = make(name="alike")
    assert alike.found("c", range(64)) == 64


def test_bl32_one_server_is_killed_and_comes_back(servers, make, short_tmp, caplog):
    engine = make()
    engine.found("a", range(128))
    engine.store(engine.job("a", range(2)))
    assert engine.found("b", range(128)) == 128
    survivor = engine.ranks[0].worker._cache.link.registration_id
    with caplog.at_level(logging.WARNING, "kvwire"):
        servers[1].kill()
        loads = engine.load(engine.job("b", range(2), first_block=20))
        wait_until(lambda: not engine.scheduler.is_healthy)
    assert [bool(load.failed) for load in loads] == [False, True]
    assert loads[1].failed_block_ids == set(range(20, 28))
    assert engine.ranks[0].worker.is_healthy
    assert engine.found("c", range(128)) == 0
    assert servers[1].address in engine.scheduler.degraded_reason
    assert any(servers[1].address in message for message in caplog.messages)
    with server_process(short_tmp / "b", *FLAGS):
        wait_until(lambda: engine.scheduler.is_healthy and engine.ranks[1].worker.is_healthy)
        assert engine.ranks[0].worker._cache.link.registration_id == survivor
        assert engine.found("d", range(128)) == 0
        assert not any(each.failed for each in engine.store(engine.job("d", range(2))))
        assert engine.found("e", range(128)) == 128
        engine.close()


def test_bl32_one_server_that_hangs_costs_one_deadline_and_comes_back(servers, make):
    engine = make()
    engine.found("a", range(128))
    engine.store(engine.job("a", range(2)))
    os.kill(servers[0].pid, signal.SIGSTOP)
    assert engine.found("b", range(128)) == 0
    wait_until(lambda: not engine.scheduler.is_healthy)
    assert engine.ranks[1].worker.is_healthy
    for number in range(20):
        engine.scheduler.maybe_submit_lookup_request(f"x{number}", tokens=range(128))
    os.kill(servers[0].pid, signal.SIGCONT)
    wait_until(lambda: engine.scheduler.is_healthy and engine.ranks[0].worker.is_healthy)
    assert engine.found("c", range(128)) == 128


def test_different_chunk_sizes_are_refused_at_start(servers, short_tmp):
    (short_tmp / "c").mkdir()
    with (
        server_process(short_tmp / "c", "--chunk-size=128") as third,
        pytest.raises(ChunkSizeIncompatible, match="All servers of an engine must have one chunk size"),
    ):
        RankEngine([servers[0].address, third.address], engine_layout())


def test_a_server_that_comes_back_with_another_chunk_size(servers, make, short_tmp):
    engine = make()
    servers[1].kill()
    with server_process(short_tmp / "b", "--chunk-size=128"):
        wait_until(lambda: "--chunk-size 64" in engine.scheduler.degraded_reason)
        wait_until(lambda: "--chunk-size 64" in engine.ranks[1].worker.degraded_reason)
        assert engine.found("a", range(128)) == 0
    with server_process(short_tmp / "b", *FLAGS):
        wait_until(lambda: engine.scheduler.is_healthy and engine.ranks[1].worker.is_healthy)
        engine.found("b", range(128))
        assert not any(each.failed for each in engine.store(engine.job("b", range(2))))
        assert engine.found("c", range(128)) == 128
        engine.close()
