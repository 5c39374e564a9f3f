"""The cases again, through the connector: both sides, a real server, an engine whose KV can be checked."""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from kvwire.client import Client
from kvwire.client.jobs import GroupBlocks
from support.mini_engine import BLOCK, MiniEngine, image
from support.server_process import server_process
from support.waiting import eventually


@pytest.fixture
def start(short_tmp):
    """An engine, and its server of a chunk size, which in the end has nothing left of any request."""
    with ExitStack() as stack:

        def make(chunk_size, **options):
            flags = (f"--chunk-size={chunk_size}", "--l1-size=4MiB")
            server = stack.enter_context(server_process(short_tmp, *flags))
            engine = MiniEngine(server.address, **options)
            stack.callback(engine.close)
            stack.callback(eventually, partial(nothing_left, server.address))
            return engine

        yield make


def nothing_left(address):
    with Client(address) as client:
        status = client.status()
    leases, memory = status.leases, status.memory
    held = leases.lookup or leases.read or leases.write or memory.reserved_bytes or memory.quarantined_bytes
    return not held and not status.sessions


def fresh(engine):
    """As another engine that has computed nothing itself: what is right in it has been loaded."""
    engine.wipe()
    return engine


def test_bl07_the_same_text_with_another_image(start):
    """Chunk 256, 600 tokens of which 260 to 400 stand for an image: text before it is shared, no more."""
    engine = start(256)
    text = [7 if 260 <= position < 401 else position for position in range(600)]

    def found(identifier, offset=260):
        ran = fresh(engine).run(text, mm_features=[image(identifier, offset, 141)])
        assert engine.is_right(ran)
        return ran.external

    assert found("ab" * 30 + "0001") == 0
    assert found("ab" * 30 + "0002") == 256
    assert found("cd" * 30 + "0001") == 256
    assert found("ab" * 30 + "0001", offset=261) == 256
    assert [found("ab" * 30 + "0001"), found("ab" * 30 + "0002")] == [512, 512]
    without = fresh(engine).run(text)
    assert without.external == 256
    assert engine.is_right(without)


def test_bl08_adapters_and_salts(start, tmp_path):
    engine = start(64)
    tokens = list(range(200))
    paths = {}
    for revision in ("one", "two"):
        paths[revision] = tmp_path / revision
        paths[revision].mkdir()
        (paths[revision] / "adapter_model.safetensors").write_bytes(revision.encode() * 100)

    def lora(revision):
        return SimpleNamespace(lora_name="red", lora_path=str(paths[revision]), lora_int_id=1)

    whose = [{}, {"cache_salt": "red"}, {"lora_request": lora("one")}, {"lora_request": lora("two")}]
    for external in (0, 192):
        for who in whose:
            ran = fresh(engine).run(tokens, **who)
            assert (ran.external, engine.is_right(ran)) == (external, True), who


def test_bl55_tenants(start):
    engine = start(64)
    tokens = list(range(200))
    found = []
    for salt in ("t1", "t2", None, "t1", "t2", None):
        ran = fresh(engine).run(tokens, cache_salt=salt)
        assert engine.is_right(ran)
        found.append(ran.external)
    assert found == [0, 0, 0, 192, 192, 192]


@pytest.mark.parametrize(("stored", "found"), [(256, 240), (512, 496), (513, 512), (1, 0)])
def test_bl10_a_full_hit_leaves_a_token_to_compute(start, stored, found):
    """At most 255, 511, 512 and 0: whole blocks of that."""
    engine = start(256)
    tokens = list(range(stored))
    assert engine.run(tokens).external == 0
    ran = fresh(engine).run(tokens)
    assert ran.external == found
    assert engine.is_right(ran)


def test_bl10_never_less_than_nothing(start):
    """The engine has all but the last block of a full hit itself."""
    engine = start(256)
    tokens = list(range(512))
    first = engine.run(tokens)
    again = engine.run(tokens, local=496, table=first.table)
    assert again.external == 0
    assert engine.is_right(again)


@pytest.mark.parametrize(("asked", "promised"), [(128, 112), (129, 128), (168, 128)])
def test_bl11_tokens_written_are_the_tokens_promised(start, asked, promised):
    engine = start(64)
    assert engine.run(list(range(128))).external == 0
    loading = fresh(engine).admit(list(range(asked)))
    assert loading.external == promised
    assert engine.is_right(loading, 0, promised)
    assert engine.is_untouched(loading, promised, asked)
    engine.compute(loading)
    engine.finish(loading)


def test_bl23_only_the_missing_block_is_written(start):
    """The engine has 48 of 64 tokens itself, in blocks that others read: those stay as they are."""
    engine = start(64)
    tokens = list(range(65))
    first = engine.run(tokens)
    fresh(engine)
    loading = engine.admit(tokens, local=48, table=first.table[:3])
    assert loading.external == BLOCK
    assert engine.is_untouched(loading, 0, 48)
    assert engine.is_right(loading, 48, 64)
    assert engine.is_untouched(loading, 64, 65)
    engine.finish(loading)


def test_bl20_blocks_with_a_new_owner_before_their_store_has_read_them(start):
    """The store is given up: its key is a miss, and never holds what the new owner wrote."""
    engine = start(64, store_wait=0.0)
    (worker,) = engine.ranks
    tokens = list(range(64))
    with held(worker):
        stored = engine.admit(tokens)
        engine.compute(stored)
        # It is preempted, and its blocks go to another request at once.
        stored.request.num_preemptions += 1
        engine.free.extendleft(reversed(stored.table))
        other = engine.admit(list(range(1000, 1064)))
        assert set(other.table) == set(stored.table)
        engine.compute(other)
    engine.finish(other)
    engine.scheduler.finished(stored.request)
    eventually(lambda: not worker.adapter._stores)
    for owner, external in ((stored, 0), (other, 48)):
        again = fresh(engine).run(owner.request.all_token_ids)
        assert (again.external, engine.is_right(again)) == (external, True)


@contextmanager
def held(worker):
    """Its copies wait meanwhile."""
    go, queue = threading.Event(), worker.adapter._queue
    run = queue._run

    def wait_and_run(kind, transfers):
        assert go.wait(20)
        run(kind, transfers)

    queue._run = wait_and_run
    yield
    go.set()


@pytest.mark.parametrize("ranks", [1, 4])
def test_bl22_a_chunk_that_is_gone_before_the_load(start, ranks):
    """Told by its blocks, of two ranks of four too: never as a success."""
    engine = start(64, world_size=ranks)
    tokens = list(range(257))
    assert engine.run(tokens).external == 0
    fresh(engine)
    drop_before_the_load(engine, {each.rank for each in engine.ranks[ranks // 2 :]})
    ran = engine.admit(tokens)
    assert ran.external == 256
    assert ran.failed
    assert ran.failed_blocks >= set(ran.table[8:12])
    assert not ran.failed_blocks & set(ran.table[16:])
    engine.compute(ran)
    assert engine.is_right(ran)
    engine.finish(ran)
    again = fresh(engine).run(tokens)
    assert (again.external, again.failed, engine.is_right(again)) == (256, False, True)


def drop_before_the_load(engine, ranks):
    """The server has lost chunk 2 of these ranks when they ask for it, once."""
    for each in engine.ranks:
        if each.rank in ranks:
            client = each.adapter._cache.client
            client.begin_retrieve = partial(begin_without_chunk_2, client, client.begin_retrieve)


def begin_without_chunk_2(client, begin, registration_id, items, **options):
    client.begin_retrieve = begin
    grants = begin(registration_id, items, **options)
    for grant in grants:
        kept = [slot for slot in grant.ticket.slots if slot.chunk_index != 2]
        assert len(kept) < len(grant.ticket.slots)
        del grant.ticket.slots[:]
        grant.ticket.slots.extend(kept)
    return grants


def test_bl31_a_worker_that_was_removed_while_idle(start):
    engine = start(64)
    tokens = list(range(200))
    engine.run(tokens)
    link = engine.ranks[0].adapter._cache.link
    link.client.unregister(link.registration_id)
    ran = fresh(engine).run(tokens)
    assert engine.is_right(ran)
    eventually(lambda: engine.ranks[0].adapter.is_healthy)
    eventually(lambda: fresh(engine).run(tokens).external == 192)


def without_chunk(op, chunk):
    """A store that leaves a hole."""
    (group,) = op.groups
    parts = [range(group.first_chunk, chunk), range(chunk + 1, group.first_chunk + group.chunk_count)]
    blocks = [tuple(block for each in part for block in group.blocks_of(each)) for part in parts]
    groups = [GroupBlocks(0, part.start, len(part), ids) for part, ids in zip(parts, blocks, strict=True)]
    return replace(op, groups=tuple(groups))


def test_bl26_ranks_that_hold_different_prefixes(start):
    """Chunk 2 of rank 1 is gone: both load what both have, and the rest is computed."""
    engine = start(64, world_size=2)
    tokens = list(range(321))
    second = engine.ranks[1].adapter
    real = second.submit_store_request
    second.submit_store_request = lambda request_id, op, event=None: real(
        request_id, without_chunk(op, 2), event
    )
    assert engine.run(tokens).external == 0
    second.submit_store_request = real
    ran = fresh(engine).run(tokens)
    assert ran.external == 128
    assert engine.is_right(ran)
    again = fresh(engine).run(tokens)
    assert again.external == 320
    assert engine.is_right(again)
