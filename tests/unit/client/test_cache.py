from __future__ import annotations

import logging
import threading
import time

import numpy as np
import pytest

from kvwire import errors
from kvwire.client import Client, KeyRange, SessionRange
from kvwire.client.binding import LivePath
from kvwire.client.jobs import GroupBlocks, TransferJob
from kvwire.client.pipeline import Task
from kvwire.keys import Namespace
from kvwire.v1 import cache_service_pb2 as pb
from support.fake_server import fake_server

BLOCKS, BLOCK_SIZE, CHUNK = 64, 4, 8
DEADLINES = {"Ping": 0.3, "BeginStore": 2, "CommitStore": 2, "BeginRetrieve": 2, "EndRetrieve": 2}
SENTINEL = 0xEE

pytestmark = pytest.mark.leakcheck("threads")


@pytest.fixture
def server(socket_path):
    limits = pb.ServerLimits(max_message_bytes=16 << 20, max_items=64, max_chunks=6, max_slots=8)
    with fake_server(f"unix:{socket_path}", chunk_size=CHUNK, limits=limits) as running:
        yield running


@pytest.fixture
def kv():
    random = np.random.default_rng(1)
    return [random.integers(0, 255, (BLOCKS, 2, 24), dtype=np.uint8) for _ in range(3)]


@pytest.fixture
def cache(server, kv):
    with Client(server.address, deadlines=DEADLINES) as client:
        made = client.register_kv_caches(
            kv, model="m", block_size=BLOCK_SIZE, data_path="inline", heartbeat_interval=0.2
        )
        with made:
            yield made


def tokens(chunks: int, seed: int = 0):
    return [seed * 1000 + i for i in range(chunks * CHUNK)]


def stored(cache, chunks: int, seed: int = 0) -> None:
    with cache.session(tokens(chunks, seed)) as session:
        assert session.store(range(chunks * 2)).ok


def rows(kv, ids):
    return [layer[list(ids)].copy() for layer in kv]


def same(left, right) -> bool:
    return all((a == b).all() for a, b in zip(left, right, strict=True))


def wait_until(check, seconds=5.0):
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_was_stored_comes_back(cache, kv):
    stored(cache, 4)
    before = rows(kv, range(8))
    with cache.session(tokens(4)) as session:
        assert session.hit_tokens == 32
        result = session.retrieve(range(20, 28))
    assert (result.ok, result.retrieved, result.retrieved_bytes) == (True, 4, 4 * 2 * 3 * 48)
    assert same(rows(kv, range(20, 28)), before)


def test_bl11_only_whole_chunks_are_promised_and_written(cache, kv):
    with cache.session([*tokens(2), 1, 2, 3]) as session:
        assert session.store(range(5)).stored == 2
    for layer in kv:
        layer[40:48] = SENTINEL
    with cache.session([*tokens(2), 1, 2, 3]) as session:
        assert session.hit_tokens == 16
        assert session.retrieve(range(40, 45)).ok
    assert all((layer[44:48] == SENTINEL).all() for layer in kv)
    assert not any((layer[40:44] == SENTINEL).all() for layer in kv)


def test_bl23_only_missing_blocks_are_written(cache, kv):
    stored(cache, 2)
    before = rows(kv, range(4))
    for layer in kv:
        layer[10:14] = SENTINEL
    with cache.session(tokens(2)) as session:
        result = session.retrieve([10, 11, 12, 13], skip_tokens=12)
        assert result.ok
        with pytest.raises(errors.InvalidArgument, match="skip_tokens"):
            session.retrieve([10, 11, 12, 13], skip_tokens=5)
    assert all((layer[10:13] == SENTINEL).all() for layer in kv)
    assert same(rows(kv, [13]), [layer[3:4] for layer in before])


def test_a_stored_prefix_costs_nothing_again(cache):
    stored(cache, 2)
    with cache.session(tokens(3)) as session:
        result = session.store(range(6))
    assert (result.ok, result.stored, result.already_stored) == (True, 1, 2)


def test_jobs_above_the_limits_are_cut_and_whole(cache, server, kv):
    stored(cache, 20)
    assert server.calls["BeginStore"] == 4
    assert max(r.items[0].session.chunk_count for r in server.requests["BeginStore"]) == 6
    before = rows(kv, range(40))
    random = np.random.default_rng(2)
    target = [int(each) for each in random.permutation(BLOCKS)[:40]]
    with cache.session(tokens(20)) as session:
        assert session.retrieve(target).retrieved == 20
    assert same(rows(kv, target), before)


def test_bl22_what_is_missing_is_named_and_the_rest_is_right(cache, server, kv):
    stored(cache, 4)
    before = rows(kv, range(8))
    server.missing = {(2, 0)}
    with cache.session(tokens(4)) as session:
        result = session.retrieve(range(20, 28))
    assert not result.ok
    assert result.failed == ((2, 0),)
    assert isinstance(result.error, errors.ObjectNotFound)
    assert result.retrieved == 3
    assert same(rows(kv, [20, 21, 22, 23, 26, 27]), [layer[[0, 1, 2, 3, 6, 7]] for layer in before])


def test_bl22_a_server_that_forgets_to_name_what_is_missing_is_not_believed(cache, server):
    stored(cache, 4)
    begin = server.BeginRetrieve

    def silent(request, context):
        reply = begin(request, context)
        for result in reply.results:
            del result.missing[:]
        return reply

    server.missing = {(1, 0)}
    server.BeginRetrieve = silent
    server.restart(keep=True)
    wait_until(lambda: cache.is_healthy)
    with cache.session(tokens(4)) as session:
        assert session.retrieve(range(20, 28)).failed == ((1, 0),)


def test_a_lost_read_lease_fails_every_block(cache, server):
    stored(cache, 3)
    server.lose_leases = True
    with cache.session(tokens(3)) as session:
        result = session.retrieve(range(20, 26))
    assert result.failed == ((0, 0), (1, 0), (2, 0))
    assert isinstance(result.error, errors.LeaseLost)


def test_an_unanswered_end_fails_every_block(cache, server):
    stored(cache, 2)
    server.fail["EndRetrieve"] = errors.Internal("no")
    with cache.session(tokens(2)) as session:
        assert session.retrieve(range(20, 24)).failed == ((0, 0), (1, 0))


def test_a_store_that_is_not_committed_is_no_success(cache, server):
    server.lose_leases = True
    with cache.session(tokens(2)) as session:
        result = session.store(range(4))
    assert not result.ok
    assert result.stored == 0
    assert result.failed == ((0, 0), (1, 0))
    assert not server.objects


def test_no_space_is_no_success(cache, server):
    grant = server._grant

    def full(registration, ticket, wanted):
        grant(registration, ticket, wanted[:1])

    server._grant = full
    begin = server.BeginStore

    def short(request, context):
        reply = begin(request, context)
        reply.results[0].no_space = 1
        return reply

    server.BeginStore = short
    server.restart(keep=True)
    wait_until(lambda: cache.is_healthy)
    with cache.session(tokens(2)) as session:
        result = session.store(range(4))
    assert (result.ok, result.stored, result.no_space) == (False, 1, 1)
    assert isinstance(result.error, errors.OutOfSpace)


def test_one_bad_job_of_a_batch_leaves_the_others_alone(cache, server):
    keys = tuple(bytes([i]) * 32 for i in range(4))
    space = cache.spec.namespace
    jobs = [
        TransferJob(KeyRange(space, keys[:2]), (GroupBlocks(0, 0, 2, (0, 1, 2, 3)),)),
        TransferJob(SessionRange("nobody", 0, 1), (GroupBlocks(0, 0, 1, (4, 5)),)),
        TransferJob(KeyRange(space, keys[2:]), (GroupBlocks(0, 0, 2, (6, 7, 8, 9)),)),
    ]
    good, bad, other = cache.store(jobs)
    assert good.ok
    assert other.ok
    assert isinstance(bad.error, errors.SessionUnknown)
    assert bad.failed == ((0, 0),)
    assert len(server.objects) == 4


@pytest.mark.parametrize(
    "groups",
    [
        (),
        (GroupBlocks(1, 0, 1, (0, 1)),),
        (GroupBlocks(0, 0, 1, (0, 1, 2)),),
        (GroupBlocks(0, 0, 1, (0, BLOCKS)),),
        (GroupBlocks(0, 0, 1, (0, -1)),),
        (GroupBlocks(0, 1, 1, (0, 1)),),
        (GroupBlocks(0, 0, 2, (0, 1, 2, 3)),),
    ],
)
def test_jobs_that_make_no_sense_are_refused_before_anything_is_sent(cache, server, groups):
    with pytest.raises(errors.InvalidArgument):
        cache.store([TransferJob(SessionRange("s", 0, 1), groups)])
    assert server.calls["BeginStore"] == 0


class Withdrawn(Task):
    """Withdrawn at the point that the test names."""

    def __init__(self, job, *, cancelled=False, commit=True):
        super().__init__(job)
        self._cancelled, self._commit = cancelled, commit

    def is_cancelled(self):
        return self._cancelled

    def may_commit(self):
        return self._commit


@pytest.mark.parametrize("options", [{"cancelled": True}, {"commit": False}])
def test_bl20_a_withdrawn_store_publishes_nothing_and_gives_its_slots_back(cache, server, options):
    job = TransferJob(KeyRange(cache.spec.namespace, (b"k" * 32,)), (GroupBlocks(0, 0, 1, (0, 1)),))
    result = cache.run_stores([Withdrawn(job, **options)])[0]
    assert not result.ok
    assert not server.objects
    assert server.calls["CommitStore"] == 0
    wait_until(lambda: not server.leases)


def test_a_path_that_cannot_be_proven_is_given_up_once(server, kv, caplog):
    caplog.set_level(logging.WARNING, "kvwire")
    client = Client(server.address)
    with client, client.register_kv_caches(kv, model="m", block_size=4, heartbeat_interval=0.1) as cache:
        assert cache.data_path == "inline"
        server.drop_registrations()
        wait_until(lambda: server.calls["RegisterKvCache"] >= 4)
        wait_until(lambda: cache.is_healthy)
        assert cache.data_path == "inline"
    assert sum("data path shm does not work" in record.getMessage() for record in caplog.records) == 1


def test_a_choice_of_paths_is_kept_to(server, kv):
    with Client(server.address) as client:
        with pytest.raises(errors.DataPathUnavailable, match="shm"):
            client.register_kv_caches(kv, model="m", block_size=4, data_path="shm")
        with pytest.raises(errors.ConfigError, match="auto, shm, ucx, inline"):
            client.register_kv_caches(kv, model="m", block_size=4, data_path="teleport")
    wait_until(lambda: not server.registrations)


def test_a_registration_that_is_refused_raises_and_leaves_nothing(server, kv):
    server.fail["RegisterKvCache"] = errors.LayoutConflict("Another engine is here.")
    with Client(server.address) as client, pytest.raises(errors.LayoutConflict, match="Another engine"):
        client.register_kv_caches(kv, model="m", block_size=4)


def test_objects_of_another_size_are_refused(cache, server):
    grant = server._grant

    def odd(registration, ticket, wanted):
        grant(registration, ticket, wanted)
        for slot in ticket.slots:
            slot.size_bytes += 1

    server._grant = odd
    with cache.session(tokens(1)) as session:
        result = session.store(range(2))
    assert isinstance(result.error, errors.TransferFailed)
    assert not server.objects
    wait_until(lambda: not server.leases)


def test_a_degraded_server_fails_everything_at_once(cache, server):
    stored(cache, 1)
    server.stop()
    wait_until(lambda: not cache.is_healthy)
    job = TransferJob(KeyRange(Namespace("m"), (b"k" * 32,)), (GroupBlocks(0, 0, 1, (0, 1)),))
    start = time.monotonic()
    assert isinstance(cache.store([job])[0].error, errors.Unavailable)
    assert cache.retrieve([job])[0].failed == ((0, 0),)
    with pytest.raises(errors.Unavailable):
        cache.session(tokens(1))
    assert time.monotonic() - start < 0.5
    server.start()


def test_a_hanging_server_costs_a_store_its_deadline_and_no_more(cache, server):
    server.hold["WriteChunks"] = threading.Event()
    cache.client.deadlines._seconds["CommitStore"] = 0.5
    with cache.session(tokens(1)) as session:
        start = time.monotonic()
        result = session.store(range(2))
        assert time.monotonic() - start < 1.5
    assert isinstance(result.error, errors.DeadlineExceeded)
    assert result.failed == ((0, 0),)


def test_bl61_a_session_that_is_closed_ends_at_the_server(cache, server):
    with cache.session(tokens(1)):
        assert len(server.sessions) == 1
    wait_until(lambda: not server.sessions)


def test_closing_lets_a_transfer_end(server, kv):
    server.delay["WriteChunks"] = 0.3
    with Client(server.address) as client:
        cache = client.register_kv_caches(kv, model="m", block_size=4, data_path="inline")
        session = cache.session(tokens(1))
        done = []
        worker = threading.Thread(target=lambda: done.append(session.store(range(2))))
        worker.start()
        wait_until(lambda: server.calls["WriteChunks"])
        cache.close()
        worker.join(5)
    assert done[0].ok
    assert server.calls["UnregisterKvCache"] == 1


def test_windows_store_and_load_what_resuming_needs(server):
    random = np.random.default_rng(3)
    full = [random.integers(0, 255, (BLOCKS, 16), dtype=np.uint8) for _ in range(2)]
    window = [random.integers(0, 255, (BLOCKS, 16), dtype=np.uint8)]
    with (
        Client(server.address) as client,
        client.register_kv_caches(
            [full, window], model="m", block_size=[4, 4], windows=[0, 5], data_path="inline"
        ) as cache,
    ):
        assert [group.blocks_per_object for group in cache.layout.groups] == [2, 1]
        with cache.session(tokens(3)) as session:
            assert session.store([range(6), range(6)]).stored == 6
        before = window[0][5].copy()
        window[0][20:26] = SENTINEL
        with cache.session(tokens(3)) as session:
            result = session.retrieve([range(30, 36), range(20, 26)])
    assert (result.ok, result.retrieved) == (True, 4)
    assert (window[0][25] == before).all()
    assert (window[0][20:25] == SENTINEL).all()


@pytest.mark.parametrize("method", ["write", "read"])
def test_one_deadline_for_all_that_one_call_has_granted(cache, monkeypatch, method):
    """A lease runs from the call on: what comes last in a batch has not more time, but less."""
    stored(cache, 1)
    known = [LivePath.write, LivePath.read]
    deadlines = []

    def watched(self, ticket, copy, deadline):
        deadlines.append(deadline)
        time.sleep(0.05)
        return known[method == "read"](self, ticket, copy, deadline)

    monkeypatch.setattr(LivePath, method, watched)
    keys = [KeyRange(cache.spec.namespace, (bytes([seed]) * 32,)) for seed in range(3)]
    jobs = [TransferJob(each, (GroupBlocks(0, 0, 1, (0, 1)),)) for each in keys]
    assert all(result.ok for result in cache.store(jobs))
    if method == "read":
        assert all(result.ok for result in cache.retrieve(jobs))
    assert len(deadlines) == 3
    assert len(set(deadlines)) == 1
