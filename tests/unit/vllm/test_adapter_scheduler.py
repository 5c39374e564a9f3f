from __future__ import annotations

import threading
import time

import pytest

from kvwire import errors
from kvwire.client import GroupKind, KvGroup, KvLayout
from kvwire.keys import Namespace
from kvwire.vllm.adapters import SchedulerAdapter
from support.fake_server import fake_server

CHUNK = 8
DEADLINES = {"Ping": 0.2, "Lookup": 0.4, "NegotiateChunkSize": 0.4, "RegisterKvCache": 0.4, "Attach": 0.4}
HASHES = [bytes([i]) * 32 for i in range(9)]

pytestmark = pytest.mark.leakcheck("threads")


def layout(chunk_size):
    return KvLayout((KvGroup(GroupKind.FULL_ATTENTION, 4, 2, 64, chunk_size // 4),))


def wait_until(check, seconds=5.0):
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def server(socket_path):
    with fake_server(f"unix:{socket_path}", chunk_size=CHUNK) as running:
        yield running


@pytest.fixture
def make(server):
    made = []

    def adapter(**options):
        settings = {"layout": layout, "engine_id": "e", "heartbeat_interval": 0.2, "deadlines": DEADLINES}
        made.append(SchedulerAdapter(server.address, None, "m", 1, 0, 4, **{**settings, **options}))
        return made[-1]

    yield adapter
    for each in made:
        each.shutdown()


def answer(adapter, request_id, seconds=3.0):
    until = time.monotonic() + seconds
    while (tokens := adapter.check_lookup_result(request_id)) is None:
        assert time.monotonic() < until
        adapter.wait_for_lookups(0.05)
    return tokens


def fill(server, adapter, tokens):
    """Has the server hold these tokens' chunks."""
    from kvwire.keys import chunk_keys, root

    for key in chunk_keys(root(adapter._namespace, CHUNK), tokens, CHUNK):
        server.objects[key, 0] = b""


def test_a_lookup_is_submitted_and_then_checked(server, make):
    adapter = make()
    assert adapter.is_healthy
    assert (adapter.chunk_size, adapter.num_blocks_per_chunk()) == (CHUNK, 2)
    fill(server, adapter, range(24))
    adapter.maybe_submit_lookup_request("r", tokens=range(40))
    assert answer(adapter, "r") == 24


def test_bl16_pending_until_it_is_known_and_asked_once(server, make):
    adapter = make()
    fill(server, adapter, range(16))
    server.delay["Lookup"] = 0.2
    assert adapter.check_lookup_result("r") is None
    for _ in range(100):
        adapter.maybe_submit_lookup_request("r", tokens=range(16))
        assert adapter.check_lookup_result("r") is None
    assert answer(adapter, "r") == 16
    for _ in range(100):
        adapter.maybe_submit_lookup_request("r", tokens=range(16))
        assert adapter.check_lookup_result("r") == 16
    assert server.calls["Lookup"] == 1


def test_bl16_a_timeout_is_a_miss_for_good_and_its_leases_go(server, make):
    adapter = make()
    fill(server, adapter, range(16))
    server.delay["Lookup"] = 0.8
    adapter.maybe_submit_lookup_request("r", tokens=range(16))
    assert answer(adapter, "r") == 0
    wait_until(lambda: server.calls["EndSession"] == 1)
    time.sleep(0.6)
    assert adapter.check_lookup_result("r") == 0
    assert server.requests["EndSession"][0].session_ids == ["r"]


def test_submitting_and_checking_never_waits(server, make):
    adapter = make()
    server.hold["Lookup"] = threading.Event()
    start = time.monotonic()
    for i in range(50):
        adapter.maybe_submit_lookup_request(str(i), tokens=range(16))
        adapter.check_lookup_result(str(i))
    assert time.monotonic() - start < 1.0
    server.hold["Lookup"].set()


def test_bl32_after_the_first_timeout_lookups_cost_nothing(server, make):
    adapter = make(heartbeat_interval=30)
    for method in ("Lookup", "Ping", "NegotiateChunkSize"):
        server.hold[method] = threading.Event()
    adapter.maybe_submit_lookup_request("first", tokens=range(16))
    adapter.maybe_submit_lookup_request("beside", tokens=range(16))
    start = time.monotonic()
    assert answer(adapter, "first") == 0
    assert answer(adapter, "beside") == 0
    assert time.monotonic() - start < 1.0
    start = time.monotonic()
    for i in range(100):
        adapter.maybe_submit_lookup_request(str(i), tokens=range(16))
        assert adapter.check_lookup_result(str(i)) == 0
    assert time.monotonic() - start < 0.4
    assert "did not end within" in adapter.degraded_reason
    for event in server.hold.values():
        event.set()
    wait_until(lambda: adapter.is_healthy)
    adapter.maybe_submit_lookup_request("after", tokens=range(16))
    assert answer(adapter, "after") == 0
    assert server.requests["Lookup"][-1].session_id == "after"


def test_an_outage_answers_what_is_pending(server, make):
    adapter = make(deadlines={**DEADLINES, "Lookup": 10})
    server.hold["Lookup"] = threading.Event()
    adapter.maybe_submit_lookup_request("r", tokens=range(16))
    server.hold["Lookup"].set()
    server.hold["Lookup"] = threading.Event()
    adapter.maybe_submit_lookup_request("s", tokens=range(16))
    server.drop_registrations()
    server.fail["NegotiateChunkSize"] = errors.BindingIncomplete("Wait.")
    assert answer(adapter, "s") == 0
    server.hold["Lookup"].set()


def test_a_missing_server_is_a_miss_and_no_error(short_tmp):
    start = time.monotonic()
    adapter = SchedulerAdapter(f"unix:{short_tmp}/none", None, "m", 1, 0, 4, deadlines=DEADLINES)
    assert time.monotonic() - start < 1.0
    assert (adapter.chunk_size, adapter.num_blocks_per_chunk()) == (None, 0)
    assert not adapter.is_healthy
    adapter.maybe_submit_lookup_request("r", tokens=range(16))
    assert adapter.check_lookup_result("r") == 0
    adapter.release_lookup("r")
    adapter.end_session("r")
    adapter.shutdown()
    adapter.shutdown()


def test_nonsense_arguments_are_refused():
    with pytest.raises(errors.ConfigError):
        SchedulerAdapter("nowhere", None, "m", 1, 0, 4)
    with pytest.raises(errors.InvalidArgument, match="kv_rank"):
        SchedulerAdapter("unix:/x", None, "m", 2, 2, 4)
    with pytest.raises(errors.InvalidArgument, match="model"):
        SchedulerAdapter("unix:/x", None, "", 1, 0, 4)


def test_bad_tokens_are_a_miss_and_leave_the_server_in_use(server, make):
    adapter = make()
    adapter.maybe_submit_lookup_request("r", tokens=[-1] * 8)
    assert adapter.check_lookup_result("r") == 0
    server.fail["Lookup"] = errors.TokensInvalid("odd")
    adapter.maybe_submit_lookup_request("s", tokens=range(8))
    assert answer(adapter, "s") == 0
    assert adapter.is_healthy


def test_block_hashes_name_chunks_by_their_last_block(server, make):
    adapter = make(layout=None)
    from kvwire.keys import keys_from_block_hashes, root

    wanted = keys_from_block_hashes(root(Namespace("m"), CHUNK), [HASHES[1], HASHES[3], HASHES[5], HASHES[7]])
    server.objects[wanted[0], 0] = server.objects[wanted[1], 0] = b""
    adapter.maybe_submit_lookup_request("r", HASHES)
    assert answer(adapter, "r") == 2 * CHUNK
    request = server.requests["Lookup"][0]
    assert list(request.chunk_keys.keys) == wanted
    # Without a layout it only looks: there is nothing to lease for, and nothing to end.
    assert (request.registration_id, request.session_id) == (0, "")


def test_adapter_and_salt_make_another_namespace(server, make):
    adapter = make()
    adapter.maybe_submit_lookup_request("r", tokens=range(8), adapter="red", adapter_revision="2", salt="t1")
    answer(adapter, "r")
    space = server.requests["Lookup"][0].namespace
    assert (space.model, space.adapter, space.adapter_revision, space.salt) == ("m", "red", "2", "t1")


def test_cleaning_up_asks_again(server, make):
    adapter = make()
    adapter.maybe_submit_lookup_request("r", tokens=range(16))
    assert answer(adapter, "r") == 0
    fill(server, adapter, range(16))
    adapter.cleanup_lookup_result("r")
    assert adapter.check_lookup_result("r") is None
    adapter.maybe_submit_lookup_request("r", tokens=range(16))
    assert answer(adapter, "r") == 16


def test_bl13_what_is_not_needed_is_released_under_its_own_lease(server, make):
    adapter = make()
    fill(server, adapter, range(32))
    adapter.maybe_submit_lookup_request("r", tokens=range(32), salt="")
    answer(adapter, "r")
    lease = adapter._lookups["r"].lease_id
    adapter.release_lookup("r", 0, 3)
    wait_until(lambda: server.calls["ReleaseLookup"] == 1)
    item = server.requests["ReleaseLookup"][0].items[0]
    assert (item.session_id, item.lease_id, item.first_chunk, item.chunk_count) == ("r", lease, 0, 3)
    adapter.release_lookup("unknown", 0, 3)
    adapter.end_session("r")
    wait_until(lambda: server.calls["EndSession"] == 1)
    assert server.calls["ReleaseLookup"] == 1
    assert adapter.check_lookup_result("r") is None


def test_bl17_ending_a_session_while_it_is_looked_up_ends_it_after_the_answer(server, make):
    adapter = make()
    fill(server, adapter, range(16))
    server.hold["Lookup"] = threading.Event()
    adapter.maybe_submit_lookup_request("r", tokens=range(16))
    wait_until(lambda: server.calls["Lookup"] == 1)
    adapter.end_session("r")
    time.sleep(0.1)
    assert server.calls["EndSession"] == 0
    server.hold["Lookup"].set()
    wait_until(lambda: server.calls["EndSession"] == 1)
    assert not server.sessions


def test_an_old_lease_is_stale(server, make, monkeypatch):
    adapter = make()
    fill(server, adapter, range(16))
    assert not adapter.is_lookup_stale("r")
    adapter.maybe_submit_lookup_request("r", tokens=range(16))
    answer(adapter, "r")
    assert not adapter.is_lookup_stale("r")
    later = time.monotonic() + 16
    monkeypatch.setattr("kvwire.vllm.adapters_scheduler.time.monotonic", lambda: later)
    assert adapter.is_lookup_stale("r")


def test_a_lease_of_an_earlier_run_of_the_server_is_stale(server, make):
    adapter = make()
    fill(server, adapter, range(16))
    adapter.maybe_submit_lookup_request("r", tokens=range(16))
    answer(adapter, "r")
    before = adapter._link.registration_id
    server.drop_registrations()
    wait_until(lambda: adapter.is_healthy and adapter._link.registration_id != before)
    assert adapter.is_lookup_stale("r")
    adapter.release_lookup("r")
    time.sleep(0.1)
    assert server.calls["ReleaseLookup"] == 0


def test_waiting_ends_with_an_answer_or_in_time(server, make):
    adapter = make()
    assert not adapter.wait_for_lookups(5)
    server.hold["Lookup"] = threading.Event()
    adapter.maybe_submit_lookup_request("r", tokens=range(16))
    start = time.monotonic()
    assert not adapter.wait_for_lookups(0.01)
    assert time.monotonic() - start < 0.2
    threading.Timer(0.05, server.hold["Lookup"].set).start()
    assert adapter.wait_for_lookups(5)
    assert adapter.check_lookup_result("r") == 0


def test_shutdown_before_the_first_lookup_and_in_the_middle_of_one(server, make):
    make().shutdown()
    adapter = make()
    server.hold["Lookup"] = threading.Event()
    adapter.maybe_submit_lookup_request("r", tokens=range(16))
    start = time.monotonic()
    adapter.shutdown()
    assert time.monotonic() - start < 1.0
    assert adapter.check_lookup_result("r") == 0
    adapter.maybe_submit_lookup_request("s", tokens=range(16))
    assert adapter.check_lookup_result("s") == 0
