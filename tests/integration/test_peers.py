"""Servers that read from each other's memory, found through a coordinator."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import trustme

from kvwire.keys import Namespace
from kvwire.server.dataplane import paths
from kvwire.server.fetch.source import Target, Wanted
from support.fleet import fleet
from support.raw_client import MODEL, OBJECT_BYTES, RawClient, content, tokens
from support.waiting import eventually

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed")

PATHS = ("ucx-local", "ucx-remote")


@pytest.fixture(params=PATHS)
def pair(request, short_tmp):
    """Servers a and b, with one data path between them."""
    with fleet(short_tmp, "a", "b", data_paths=("shm", request.param)) as made:
        yield made


@pytest.fixture
def three(short_tmp):
    with fleet(short_tmp, "a", "b", "c", data_paths=("shm", "ucx-local")) as made:
        yield made


def right(client, prompt: bytes, salt: str = "") -> list[bytes]:
    return [content(key) for key in client.keys(prompt, salt)]


def lose(server, keys) -> None:
    """These chunks go, and nobody is told."""

    def drop() -> None:
        store = server.engine.store
        listener, store.listener = store.listener, None
        for key in keys:
            chunk = store.get(key)
            for stored in [each for each in chunk.shards if each is not None]:
                store.discard(stored)
        store.listener = listener

    server.run(drop)


def test_what_one_server_holds_is_a_hit_at_the_other(pair):
    b = pair.client("b")
    prompt = tokens(6)
    pair.store("a", prompt)
    found = b.lookup("r", prompt)
    assert (found.hit_chunks, found.peer_chunks) == (6, 6)
    b.end_session("r")
    assert b.retrieve("again", prompt) == right(b, prompt)
    pair.check()
    peer = pair.peer("b", "a")
    assert (peer.fetched_chunks, peer.fetched_bytes, peer.problem) == (6, 6 * OBJECT_BYTES, "")
    given = pair.servers["a"].run(pair.sharing("a").status)
    assert (given.given_leases, given.given_bytes) == (1, 6 * OBJECT_BYTES)
    facts = pair.servers["b"].run(pair.sharing("b").facts)
    assert (facts.sharing, facts.apart, facts.failed_hints, facts.fallback_chunks) == (1, 0, 0, 0)
    assert (facts.fetched_chunks, facts.fetched_bytes) == (6, 6 * OBJECT_BYTES)
    assert facts.question_seconds > 0
    assert (facts.failed_questions, facts.located_chunks <= facts.asked_chunks) == (0, True)
    assert pair.servers["a"].status().waiting_leases == 0


def test_only_what_is_lacking_moves(pair):
    b, prompt = pair.client("b"), tokens(8)
    pair.store("b", tokens(3))
    pair.store("a", prompt)
    found = b.lookup("r", prompt)
    assert (found.hit_chunks, found.peer_chunks) == (8, 5)
    assert pair.peer("b", "a").fetched_bytes == 5 * OBJECT_BYTES


def test_a_long_prompt_comes_in_batches_each_under_a_lease_of_its_own(pair):
    b, prompt = pair.client("b"), tokens(9)
    pair.store("a", prompt)
    prefetcher = pair.servers["b"].core.prefetcher
    prefetcher.limits = dataclasses.replace(prefetcher.limits, batch_bytes=4 * OBJECT_BYTES)
    assert b.lookup("r", prompt).peer_chunks == 9
    b.end_session("r")
    assert b.retrieve("again", prompt) == right(b, prompt)
    assert pair.peer("b", "a").fetched_chunks == 9
    given = pair.servers["a"].run(pair.sharing("a").status)
    assert (given.given_leases, given.given_bytes >= 9 * OBJECT_BYTES) == (3, True)
    eventually(lambda: pair.calls("a", "LookupAndLease") == pair.calls("a", "ReleaseLease") == 3)
    pair.check()


def test_what_nobody_wants_is_not_in_the_way_of_the_rest(pair):
    """More messages than may be under way at once are not taken."""
    b, prompt, chunks = pair.client("b"), tokens(40), 40
    pair.store("a", prompt)
    server = pair.servers["b"]
    keys = b.keys(prompt)
    buffers = {index: bytearray(OBJECT_BYTES) for index in (1, 38, 39)}
    ended = []

    async def fetch():
        now = time.monotonic()
        space = server.engine._state.spaces.open(Namespace(MODEL), b.chunk_size)
        found = await server.core.sharing.source.find(Wanted(space, keys, [0] * chunks), now + 5)
        assert list(found.masks) == [1] * chunks
        targets = [Target(index, 0, OBJECT_BYTES, memoryview(each)) for index, each in buffers.items()]
        await found.fetch(targets, lambda *told: ended.append(told), now + 5)
        await found.release()

    server.run(fetch)
    assert [(target.index, error) for target, _, error in ended] == [(1, None), (38, None), (39, None)]
    assert all(bytes(buffers[index]) == content(keys[index]) for index in buffers)
    eventually(lambda: not pair.servers["a"].status().waiting_leases)
    pair.check()


def test_many_prompts_at_once_from_two_servers_while_both_evict(short_tmp):
    """Everything moves at once and little fits: every hit has its bytes, and all memory comes back."""
    settings = {"data_paths": ("shm", "ucx-local", "ucx-remote"), "prefetch_deadline": 20.0}
    with fleet(short_tmp, "a", "b", **settings, l1_size=3 << 20) as made:
        for seed in range(8):
            made.store("ab"[seed % 2], tokens(4, seed))

        def visit(number: int) -> int:
            name = "ab"[number % 2]
            client, prompt = made.client(name), tokens(4, number // 2 % 10)
            session = f"{number}"
            hit = client.lookup(session, prompt).hit_chunks
            if hit:
                result = client.begin_retrieve(session, 0, hit)
                data = client.read(result.ticket)
                if client.end_retrieve(result.ticket.lease_id):
                    keys = client.keys(prompt)
                    assert data == [content(keys[slot.chunk_index]) for slot in result.ticket.slots]
            client.end_session(session)
            return hit

        with ThreadPoolExecutor(8) as pool:
            hits = list(pool.map(visit, range(120)))
        assert sum(hits) > 0
        fetched = sum(made.peer(one, other).fetched_chunks for one, other in ("ab", "ba"))
        assert fetched > 0
        for server in made.servers.values():
            eventually(lambda server=server: not server.status().waiting_leases, within=20)
        made.check()
        for server in made.servers.values():
            server.run(server.engine.clear)
            assert server.status().l1.used_bytes == 0


def test_both_directions_at_once(pair):
    a, b = pair.client("a"), pair.client("b")
    pair.store("a", tokens(4, seed=1))
    pair.store("b", tokens(4, seed=2))
    assert b.lookup("r", tokens(4, seed=1)).peer_chunks == 4
    assert a.lookup("r", tokens(4, seed=2)).peer_chunks == 4
    b.end_session("r"), a.end_session("r")
    assert a.retrieve("again", tokens(4, seed=2)) == right(a, tokens(4, seed=2))
    pair.check()


def test_the_next_server_goes_on_where_one_ends(three):
    b, prompt = three.client("b"), tokens(6)
    three.store("a", tokens(3))
    three.store("c", prompt)
    lose(three.servers["c"], b.keys(tokens(2)))
    found = b.lookup("r", prompt)
    assert (found.hit_chunks, found.peer_chunks) == (6, 6)
    b.end_session("r")
    assert b.retrieve("again", prompt) == right(b, prompt)
    assert three.peer("b", "a").fetched_chunks >= 2
    assert three.peer("b", "c").fetched_chunks >= 3


def test_a_wrong_hint_leads_to_another_copy_and_then_to_a_miss(three):
    b, prompt = three.client("b"), tokens(4)
    three.store("a", prompt)
    three.store("c", prompt)
    lose(three.servers["a"], b.keys(prompt))
    assert b.lookup("r", prompt).peer_chunks == 4
    b.end_session("r")
    other = tokens(4, seed=7)
    three.store("a", other)
    three.store("c", other)
    lose(three.servers["a"], b.keys(other))
    lose(three.servers["c"], b.keys(other))
    assert b.lookup("r", other).hit_chunks == 0
    assert sum(three.peer("b", name).failed_hints for name in "ac") >= 8
    assert three.servers["b"].run(three.sharing("b").status).fallback_chunks == 4
    three.check()


def test_bl55_a_tenant_is_served_from_its_own_chunks_only(pair):
    b, prompt = pair.client("b"), tokens(4)
    pair.store("a", prompt, salt="t1")
    assert b.lookup("other", prompt, salt="t2").hit_chunks == 0
    assert b.lookup("none", prompt).hit_chunks == 0
    assert b.lookup("same", prompt, salt="t1").peer_chunks == 4
    b.end_session("same")
    assert b.retrieve("again", prompt, salt="t1") == right(b, prompt, "t1")


def test_paths_are_agreed_on_and_a_server_without_one_shares_nothing(short_tmp):
    with fleet(short_tmp, data_paths=("shm", "ucx-local", "ucx-remote")) as made:
        made.start("a")
        made.start("b", data_paths=("shm", "ucx-remote"))
        made.start("c", data_paths=("shm", "inline"))
        made.start("d", peers=False)
        prompt = tokens(3)
        made.store("a", prompt)
        assert made.client("b").lookup("r", prompt).peer_chunks == 3
        assert made.client("c").lookup("r", prompt).hit_chunks == 0
        assert "no UCX path" in made.peer("c", "a").problem
        assert made.client("d").lookup("r", prompt).hit_chunks == 0
        assert not made.client("d").status().HasField("sharing")
        assert made.peer("a", "d").problem == "it shares nothing"


def test_a_server_without_ucx_shares_nothing_and_says_so(short_tmp, monkeypatch):
    monkeypatch.setattr(paths, "find_spec", lambda _name: None)
    with fleet(short_tmp, "a", "b") as made:
        made.store("a", tokens(3))
        assert made.client("b").lookup("r", tokens(3)).hit_chunks == 0
        assert "ucxx is not installed" in made.peer("b", "a").problem
        assert made.sharing("a").features == []
        assert made.calls("a", "LookupAndLease") == 0


def test_a_token_is_asked_for_and_given(short_tmp):
    token = short_tmp / "token"
    token.write_text("secret")
    with fleet(short_tmp, data_paths=("shm", "ucx-local")) as made:
        # The one that asks for it is asked by peers only: its own client has no token.
        made.start("a", token_file=str(token), wait=False)
        made.start("b", peer_token_file=str(token), wait=False)
        made.start("c", wait=False)
        made.acquainted()
        channel = made.servers["a"].channel(secret="secret")
        client = RawClient(channel).register("shm")
        try:
            prompt = tokens(3)
            client.store("s", prompt)
            eventually(lambda: made.located(prompt).get("a") == 3)
            assert made.client("c").lookup("r", prompt).hit_chunks == 0
            assert "token" in made.peer("c", "a").problem
            assert made.client("b").lookup("r", prompt).peer_chunks == 3
        finally:
            client.let_go()


def test_tls_between_servers_and_a_certificate_that_is_not_known(short_tmp):
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    (short_tmp / "ca.pem").write_bytes(authority.cert_pem.bytes())
    (short_tmp / "strange.pem").write_bytes(trustme.CA().cert_pem.bytes())
    (short_tmp / "cert.pem").write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    (short_tmp / "key.pem").write_bytes(issued.private_key_pem.bytes())
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with fleet(short_tmp, data_paths=("shm", "ucx-local")) as made:
        made.start(
            "a",
            listen=(f"unix:{short_tmp / 'a' / 'local.sock'}", f"127.0.0.1:{port}"),
            advertise=(f"localhost:{port}",),
            tls_cert=str(short_tmp / "cert.pem"),
            tls_key=str(short_tmp / "key.pem"),
            wait=False,
        )
        made.start("b", peer_ca=str(short_tmp / "ca.pem"), wait=False)
        made.start("c", peer_ca=str(short_tmp / "strange.pem"), wait=False)
        made.acquainted()
        prompt = tokens(3)
        made.store("a", prompt)
        assert made.client("c").lookup("r", prompt).hit_chunks == 0
        assert made.peer("c", "a").problem
        assert made.client("b").lookup("r", prompt).peer_chunks == 3


def test_a_server_with_another_chunk_size_is_refused_before_any_byte(short_tmp):
    with fleet(short_tmp, data_paths=("shm", "ucx-local")) as made:
        made.start("a")
        made.start("b", chunk_size=8)
        made.store("a", tokens(4))
        b = made.client("b")
        assert b.lookup("r", tokens(4)).hit_chunks == 0
        sharing = made.servers["a"].run(made.sharing("a").status)
        assert sharing.given_leases == 0


def test_a_server_with_another_layout_is_asked_once_and_gives_nothing(short_tmp):
    with fleet(short_tmp, "a", "b", data_paths=("shm", "ucx-local")) as made:
        prompt = tokens(4)
        made.store("a", prompt)
        b = made.client("b", object_bytes=OBJECT_BYTES // 2)
        assert b.lookup("r", prompt).hit_chunks == 0
        assert "layout" in made.peer("b", "a").problem
        eventually(lambda: made.calls("a", "LookupAndLease") == 1)
        assert b.lookup("s", prompt).hit_chunks == 0
        assert made.calls("a", "LookupAndLease") == 1
        assert made.servers["a"].run(made.sharing("a").status).given_leases == 0


def test_a_lease_that_is_not_fetched_yet_is_not_in_the_way_of_another(pair):
    b = pair.client("b")
    server, source = pair.servers["b"], pair.sharing("b").source
    late, soon = tokens(40, seed=1), tokens(4, seed=2)
    for prompt in (late, soon):
        pair.store("a", prompt)

    async def find():
        space = server.engine._state.spaces.open(Namespace(MODEL), b.chunk_size)
        keys = b.keys(late)
        return await source.find(Wanted(space, keys, [0] * len(keys)), time.monotonic() + 5)

    b.lookup("knows its namespace", tokens(1, seed=9))
    found = server.run(find)
    assert sum(found.masks) == 40
    assert b.lookup("r", soon).peer_chunks == 4
    server.run(found.release)
    eventually(lambda: not pair.servers["a"].status().waiting_leases)
    pair.check()
