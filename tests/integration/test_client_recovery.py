"""An engine whose server goes, restarts, forgets it or changes: each part recovers, and both say why not."""

from __future__ import annotations

import contextlib
import logging

import pytest

from kvwire.cli import app
from kvwire.client import Client, GroupKind, KvGroup, KvLayout, Registration, Role
from support.rank_engine import CHUNK, SPACE, RankEngine, engine_layout, wait_until
from support.server_process import server_process

FLAGS = ("--chunk-size=64", "--l1-size=8MiB")
NEVER = 600.0
"""A heartbeat that is too late for these tests: what they see is noticed by other means."""


@pytest.fixture
def serve(short_tmp):
    """Starts a server at the one address of the test; the one before it is to be killed first."""
    with contextlib.ExitStack() as stack:
        yield lambda *flags: stack.enter_context(
            server_process(short_tmp, *(flags or FLAGS), listen=f"unix:{short_tmp}/kvwire.sock")
        )


@pytest.fixture
def make():
    with contextlib.ExitStack() as stack:

        def engine(server, **options):
            made = RankEngine([server.address], engine_layout(), **options)
            stack.callback(made.close)
            return made

        yield engine


def parts(engine):
    return [engine.scheduler, *(rank.worker for rank in engine.ranks)]


def links(engine):
    return [engine.scheduler.adapters[0].link, *(rank.worker._cache.link for rank in engine.ranks)]


def is_healthy(engine):
    return all(part.is_healthy for part in parts(engine))


def works(engine, session):
    """A prompt is stored and found again: sessions, registrations and data paths are all in order."""
    tokens = list(session.encode()) * 128
    engine.found(session, tokens[:128])
    stored = not any(each.failed for each in engine.store(engine.job(session, range(2))))
    found = engine.found(f"{session}-again", tokens[:128])
    loaded = not any(each.failed for each in engine.load(engine.job(f"{session}-again", range(2), 20)))
    return stored and found == 128 and loaded


def status(server):
    with Client(server.address) as client:
        return client.status()


@pytest.mark.parametrize("interval", [0.3, NEVER])
def test_a_restart_within_one_heartbeat(serve, make, interval):
    server = serve()
    engine = make(server, heartbeat_interval=interval)
    assert works(engine, "before")
    ids = [link.registration_id for link in links(engine)]
    server.kill()
    server = serve()
    wait_until(lambda: is_healthy(engine) and all(link.registration_id not in ids for link in links(engine)))
    assert sorted((each.role, each.kv_rank) for each in status(server).registrations) == [
        (Role.SCHEDULER, 0),
        (Role.WORKER, 0),
        (Role.WORKER, 1),
    ]
    assert works(engine, "after")


def test_everything_fails_at_once_while_the_server_is_away(serve, make, caplog):
    server = serve()
    engine = make(server)
    assert works(engine, "before")
    with caplog.at_level(logging.WARNING, "kvwire"):
        server.kill()
        wait_until(lambda: not any(part.is_healthy for part in parts(engine)))
        assert engine.found("away", range(128)) == 0
        assert all(each.failed for each in engine.store(engine.job("away", range(2))))
        assert all(
            each.failed_block_ids == set(range(8)) for each in engine.load(engine.job("away", range(2)))
        )
    assert any("is not used" in message and server.address in message for message in caplog.messages)
    assert all(part.degraded_reason for part in parts(engine))
    serve()
    wait_until(lambda: is_healthy(engine))
    assert works(engine, "after")


@pytest.mark.parametrize("which", [0, 1, 2], ids=["scheduler", "rank 0", "rank 1"])
def test_bl31_the_server_forgets_one_part(serve, make, which):
    server = serve()
    engine = make(server, heartbeat_interval=NEVER)
    before = [link.registration_id for link in links(engine)]
    with Client(server.address) as client:
        client.unregister(before[which])
    wait_until(lambda: is_healthy(engine) and links(engine)[which].registration_id != before[which])
    others = [link.registration_id for index, link in enumerate(links(engine)) if index != which]
    assert others == [each for index, each in enumerate(before) if index != which]
    assert works(engine, "after")


def test_another_chunk_size_is_told_on_both_sides_and_settles_nothing(serve, make, capsys):
    server = serve()
    engine = make(server)
    server.kill()
    server = serve("--chunk-size=128", "--l1-size=8MiB")
    for part in parts(engine):
        wait_until(lambda part=part: "--chunk-size 64" in part.degraded_reason)
    assert engine.found("r", range(128)) == 0
    told = status(server)
    assert told.chunk_size.chunk_size == 0
    assert not told.registrations
    assert {each.client_name for each in told.refused} == {"scheduler", "worker 0", "worker 1"}
    assert all("--chunk-size 64" in each.message and each.times for each in told.refused)
    assert app.main(["status", "--address", server.address]) == 0
    shown = capsys.readouterr().out
    assert "turned away" in shown
    assert "chunk-size-incompatible" in shown
    with Client(server.address) as other:
        assert other.negotiate(16).chunk_size == 128
    wait_until(lambda: status(server).refused[0].times > told.refused[0].times)
    server.kill()
    server = serve()
    wait_until(lambda: is_healthy(engine))
    assert works(engine, "after")
    assert not status(server).refused


def test_a_layout_that_conflicts_is_told_and_heals_when_the_other_engine_leaves(serve, make):
    server = serve()
    with Client(server.address) as other:
        other.negotiate(16)
        layout = KvLayout((KvGroup(GroupKind.FULL_ATTENTION, 16, 1, 512, CHUNK // 16),))
        what = Registration(b"o" * 16, "other", Role.SCHEDULER, SPACE, layout, CHUNK, client_name="the other")
        registration = other.register(what)
        engine = make(server)
        wait_until(lambda: all("the other" in part.degraded_reason for part in parts(engine)))
        assert engine.found("r", range(128)) == 0
        refused = status(server).refused
        assert {each.client_name for each in refused} == {"scheduler", "worker 0", "worker 1"}
        assert all("another KV layout" in each.message for each in refused)
        other.unregister(registration.registration_id)
        wait_until(lambda: is_healthy(engine))
    assert not status(server).refused
    assert works(engine, "after")


def test_a_worker_that_met_another_server_first_takes_the_schedulers_size(serve, make):
    """Worker and scheduler negotiate on their own: what the scheduler works with is what counts."""
    server = serve("--chunk-size=128", "--l1-size=8MiB")
    engine = make(server)
    for rank in engine.ranks:
        assert rank.worker.chunk_size == 128
        rank.worker.require_chunk_size(CHUNK)
    server.kill()
    serve()
    for rank in engine.ranks:
        wait_until(lambda rank=rank: rank.worker.is_healthy)
        assert rank.worker.chunk_size == CHUNK
    assert not engine.scheduler.is_healthy
