"""One engine at several servers: who holds what, what counts as found, what one bad server costs."""

from __future__ import annotations

import threading
import time

import pytest

from kvwire.client import GroupKind, KvGroup, KvLayout
from kvwire.errors import ChunkSizeIncompatible, ConfigError
from kvwire.keys import Namespace, chunk_keys, keys_from_block_hashes, root
from kvwire.vllm.servers import Share, SpreadSchedulerAdapter, spread
from support.fake_server import fake_server

CHUNK = 8
WHOLE = Namespace("m", layout_fingerprint=b"engine")
DEADLINES = {"Ping": 1, "Lookup": 2, "NegotiateChunkSize": 2, "RegisterKvCache": 2, "Attach": 2}

pytestmark = pytest.mark.leakcheck("threads")


def full(chunk_size):
    return KvLayout((KvGroup(GroupKind.FULL_ATTENTION, 4, 2, 64, chunk_size // 4),), 2)


def windowed(chunk_size):
    window = KvGroup(GroupKind.SLIDING_WINDOW, 4, 2, 64, chunk_size // 4, window_tokens=CHUNK + 1)
    return KvLayout((*full(chunk_size).groups, window), 2)


def eventually(check, seconds=10.0):
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def servers(short_tmp):
    with (
        fake_server(f"unix:{short_tmp}/a", chunk_size=CHUNK) as first,
        fake_server(f"unix:{short_tmp}/b", chunk_size=CHUNK) as second,
    ):
        yield first, second


@pytest.fixture
def make(servers):
    made = []

    def adapter(layout=full, **options):
        settings = {"engine_id": "e", "heartbeat_interval": 0.2, "deadlines": DEADLINES, "alignment": 4}
        shares = spread([server.address for server in servers], 2)
        made.append(
            SpreadSchedulerAdapter(shares, "m", 4, namespace=WHOLE, layout=layout, **{**settings, **options})
        )
        return made[-1]

    yield adapter
    for each in made:
        each.shutdown()


def fill(server, rank, tokens):
    """Has the server hold these tokens' chunks of one rank."""
    share = Share(server.address, (rank,), 2)
    hashes = chunk_keys(root(WHOLE, CHUNK), tokens, CHUNK)
    for key in keys_from_block_hashes(root(share.namespace(WHOLE), CHUNK), hashes):
        server.objects[key, 0] = b""


def answer(adapter, request_id, seconds=10.0):
    until = time.monotonic() + seconds
    while (tokens := adapter.check_lookup_result(request_id)) is None:
        assert time.monotonic() < until
        adapter.wait_for_lookups(0.02)
    return tokens


def found(spread_adapter, request_id, tokens, **options):
    spread_adapter.maybe_submit_lookup_request(request_id, tokens=tokens, **options)
    return answer(spread_adapter, request_id)


def released(server):
    """(first chunk, count); calls that nobody waits for may overtake each other."""
    return sorted(
        (item.first_chunk, item.chunk_count)
        for request in list(server.requests["ReleaseLookup"])
        for item in request.items
    )


class TestSpread:
    def test_ranks_take_turns(self):
        first, second = spread(["a", "b"], 5)
        assert (first.ranks, second.ranks) == ((0, 2, 4), (1, 3))
        assert [second.local_rank(rank) for rank in second.ranks] == [0, 1]

    def test_one_server_has_the_whole_engine_under_the_engines_own_namespace(self):
        (share,) = spread(["a"], 4)
        assert share.ranks == (0, 1, 2, 3)
        assert share.namespace(WHOLE) == WHOLE
        assert share.layout(full)(8).world_size == 4

    def test_data_parallel_engines_use_the_servers_in_turn(self):
        used = [spread(["a", "b", "c"], 1, engine_index=index)[0].address for index in range(4)]
        assert used == ["a", "b", "c", "a"]
        assert [share.ranks for share in spread(["a", "b"], 1, engine_index=1)] == [(0,)]

    def test_servers_without_a_rank_are_left_out(self):
        assert [share.address for share in spread(["a", "b", "c"], 2)] == ["a", "b"]

    def test_bl28_ranks_that_share_blocks_are_at_one_server(self):
        first, second = spread(["a", "b"], 16, ranks_together=4)
        assert first.ranks == (0, 1, 2, 3, 8, 9, 10, 11)
        assert second.ranks == (4, 5, 6, 7, 12, 13, 14, 15)

    def test_bl28_uneven_groups_are_refused_with_the_reason(self):
        with pytest.raises(ConfigError, match=r"6 ranks for each are no whole number of groups of 4"):
            spread(["a", "b"], 12, ranks_together=4)
        assert len(spread(["a", "b", "c"], 12, ranks_together=4)) == 3

    def test_a_server_that_is_named_twice_is_refused(self):
        with pytest.raises(ConfigError, match="several different ones"):
            spread(["a", "a"], 2)

    def test_the_shares_of_other_ranks_have_other_keys(self):
        """Engines that name the same servers in another order never take one rank's bytes for another's."""
        shares = [*spread(["a", "b"], 2), *spread(["a"], 2), *spread(["a", "b"], 4), *spread(["a"], 1)]
        roots = {root(share.namespace(WHOLE), CHUNK) for share in shares[:5]}
        assert len(roots) == 5
        assert spread(["b", "a"], 2)[0].namespace(WHOLE) == shares[0].namespace(WHOLE)


class TestLookups:
    def test_each_server_is_told_of_its_own_ranks_only(self, servers, make):
        make()
        for server in servers:
            (registration,) = server.registrations.values()
            assert registration.layout.world_size == 1
            assert registration.kv_rank == 0

    def test_a_hit_is_what_all_have_and_the_surplus_is_given_back(self, servers, make):
        adapter = make()
        assert adapter.chunk_size == CHUNK
        fill(servers[0], 0, range(32))
        fill(servers[1], 1, range(16))
        assert found(adapter, "r", range(40)) == 16
        eventually(lambda: released(servers[0]) == [(2, 0)])
        assert released(servers[1]) == []
        adapter.release_lookup("r", 0, 1)
        adapter.release_lookup("r", 1)
        eventually(lambda: released(servers[0]) == [(0, 1), (1, 1), (2, 0)])
        eventually(lambda: released(servers[1]) == [(0, 1), (1, 1)])

    def test_what_only_one_has_is_a_miss_and_all_of_it_is_given_back(self, servers, make):
        adapter = make()
        fill(servers[1], 1, range(16))
        assert found(adapter, "r", range(40)) == 0
        eventually(lambda: released(servers[1]) == [(0, 0)])
        adapter.release_lookup("r")
        adapter.end_session("r")
        eventually(lambda: servers[1].calls["EndSession"] == 1)
        assert len(released(servers[1])) == 1

    def test_bytes_of_another_rank_are_not_found(self, servers, make):
        adapter = make()
        fill(servers[0], 1, range(16))
        fill(servers[1], 0, range(16))
        assert found(adapter, "r", range(40)) == 0

    def test_with_windows_the_longer_one_is_asked_for_the_common_prefix(self, servers, make):
        """What it needs to resume earlier may be gone there, and its lease covers the later boundary."""
        adapter = make(windowed)
        fill(servers[0], 0, range(32))
        fill(servers[1], 1, range(16))
        assert found(adapter, "r", range(40)) == 16
        asked = [len(request.chunk_keys.keys) for request in servers[0].requests["Lookup"]]
        assert asked == [5, 2]
        assert servers[1].calls["Lookup"] == 1
        assert not released(servers[0])

    def test_asked_once_and_again_after_a_clean_up(self, servers, make):
        adapter = make()
        fill(servers[0], 0, range(16))
        for _ in range(3):
            assert found(adapter, "r", range(16)) == 0
        assert servers[0].calls["Lookup"] == servers[1].calls["Lookup"] == 1
        adapter.cleanup_lookup_result("r")
        assert adapter.check_lookup_result("r") is None
        fill(servers[1], 1, range(16))
        assert found(adapter, "r", range(16)) == 16

    def test_tenants_and_adapters_are_kept_apart(self, servers, make):
        adapter = make()
        fill(servers[0], 0, range(16))
        fill(servers[1], 1, range(16))
        assert found(adapter, "salt", range(16), salt="red") == 0
        assert found(adapter, "lora", range(16), adapter="red") == 0
        assert found(adapter, "none", range(16)) == 16

    def test_bad_tokens_are_a_miss_and_nobody_is_asked(self, servers, make):
        adapter = make()
        assert found(adapter, "r", [-1] * 16) == 0
        assert not servers[0].calls["Lookup"]
        assert adapter.is_healthy

    def test_a_session_ends_at_every_server(self, servers, make):
        adapter = make()
        found(adapter, "r", range(16))
        adapter.end_session("r")
        for server in servers:
            eventually(lambda server=server: server.calls["EndSession"] and not server.sessions)

    def test_an_old_lease_at_one_server_makes_the_answer_stale(self, servers, make, monkeypatch):
        adapter = make()
        fill(servers[0], 0, range(16))
        fill(servers[1], 1, range(16))
        assert found(adapter, "r", range(16)) == 16
        assert not adapter.is_lookup_stale("r")
        servers[1].restart(keep=True)
        servers[1].drop_registrations()
        eventually(lambda: adapter.is_lookup_stale("r"))


class TestOneBadServer:
    def test_bl32_healthy_only_while_every_server_is(self, servers, make):
        adapter = make()
        assert adapter.is_healthy
        assert adapter.degraded_reason == ""
        servers[1].stop()
        eventually(lambda: not adapter.is_healthy)
        assert servers[1].address in adapter.degraded_reason
        assert servers[0].address not in adapter.degraded_reason
        assert adapter.adapters[0].is_healthy

    def test_bl32_one_heartbeat_loop_for_each_server(self, servers, make):
        make()
        make()
        names = [thread.name for thread in threading.enumerate() if "kvwire-health" in thread.name]
        assert sorted(names) == sorted(f"kvwire-health {server.address}" for server in servers)

    def test_it_makes_every_lookup_a_miss_and_comes_back_by_itself(self, servers, make):
        adapter = make()
        fill(servers[0], 0, range(16))
        fill(servers[1], 1, range(16))
        before = dict(servers[0].registrations)
        servers[1].stop()
        eventually(lambda: not adapter.is_healthy)
        assert found(adapter, "r", range(16)) == 0
        servers[1].start()
        eventually(lambda: adapter.is_healthy)
        assert servers[0].registrations == before
        assert found(adapter, "s", range(16)) == 16

    def test_bl32_one_that_hangs_costs_one_deadline(self, servers, make):
        adapter = make(heartbeat_interval=30)
        for method in ("Lookup", "Ping", "NegotiateChunkSize"):
            servers[1].hold[method] = threading.Event()
        assert found(adapter, "r", range(16)) == 0
        eventually(lambda: not adapter.is_healthy)
        asked = servers[0].calls["Lookup"]
        for i in range(50):
            adapter.maybe_submit_lookup_request(f"x{i}", tokens=range(16))
        assert servers[1].calls["Lookup"] == 1
        assert servers[0].calls["Lookup"] >= asked

    def test_a_missing_server_is_no_reason_not_to_start(self, servers, make):
        servers[1].stop()
        adapter = make()
        assert not adapter.is_healthy
        assert adapter.chunk_size == CHUNK
        assert found(adapter, "r", range(16)) == 0
        servers[1].start()
        eventually(lambda: adapter.is_healthy)


class TestChunkSizes:
    def test_different_ones_are_refused_at_start(self, servers, make):
        servers[1].chunk_size = 16
        with pytest.raises(ChunkSizeIncompatible) as caught:
            make()
        assert "All servers of an engine must have one chunk size" in str(caught.value)
        assert "has 8" in str(caught.value)
        assert "has 16" in str(caught.value)
        assert all(server.address in str(caught.value) for server in servers)

    def test_a_late_server_with_another_one_is_not_used_until_it_has_the_right_one(self, servers, make):
        servers[1].stop()
        adapter = make()
        servers[1].chunk_size = 16
        servers[1].start()
        eventually(lambda: "--chunk-size 8" in adapter.degraded_reason)
        assert servers[0].address in adapter.degraded_reason
        assert adapter.chunk_size == CHUNK
        assert not servers[1].registrations
        servers[1].chunk_size = CHUNK
        servers[1].restart()
        eventually(lambda: adapter.is_healthy)
