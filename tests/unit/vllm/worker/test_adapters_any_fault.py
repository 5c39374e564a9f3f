"""Whatever call fails, in whatever way: nothing is raised, everything ends, and all comes back."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from kvwire import errors
from kvwire.client import GroupKind, KvGroup, KvLayout
from kvwire.vllm.adapters import SchedulerAdapter
from support.worker_adapter import CHUNK, DEADLINES, finished, hashes, op, wait_until

METHODS = (
    "NegotiateChunkSize",
    "RegisterKvCache",
    "Attach",
    "Ping",
    "UnregisterKvCache",
    "Lookup",
    "ReleaseLookup",
    "EndSession",
    "BeginStore",
    "WriteChunks",
    "CommitStore",
    "AbortStore",
    "BeginRetrieve",
    "ReadChunks",
    "EndRetrieve",
)
FAULTS = {
    "a fault of the server": errors.Internal("broken"),
    "not registered": errors.NotRegistered("who?", registration_id=1),
    "hangs": None,
}
SHORT = dict.fromkeys((*DEADLINES, *METHODS), 0.3)

pytestmark = pytest.mark.leakcheck("threads")


def layout(chunk_size):
    return KvLayout((KvGroup(GroupKind.FULL_ATTENTION, 4, 3, 144, chunk_size // 4),))


class Engine:
    def __init__(self, server, make):
        self.worker = make(deadlines=SHORT)
        self.scheduler = SchedulerAdapter(
            server.address, None, "m", 1, 0, 4, layout=layout, heartbeat_interval=0.2, deadlines=SHORT
        )

    def request(self, name, seed):
        """One request from its lookup to its end: stored, loaded, forgotten. Returns what was found."""
        scheduler, worker = self.scheduler, self.worker
        scheduler.maybe_submit_lookup_request(name, hashes(2, seed))
        wait_until(lambda: scheduler.check_lookup_result(name) is not None)
        found = scheduler.check_lookup_result(name)
        scheduler.is_lookup_stale(name)
        worker.submit_store_request(name, op(2, seed=seed))
        finished(worker, {name}, stores={name})
        load = worker.submit_retrieve_request(name, op(2, first_block=20, seed=seed))
        finished(worker, set(), loads={name})
        assert load.done()
        assert worker.failed_requests() == ({name} if load.failed else set())
        assert worker.get_block_ids_with_load_errors() <= set(range(20, 24))
        scheduler.release_lookup(name)
        scheduler.end_session(name)
        return found

    def is_healthy(self):
        return self.scheduler.is_healthy and self.worker.is_healthy

    def works(self, name, seed):
        self.request(name, seed)
        return self.request(f"{name} again", seed) == 2 * CHUNK


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_raised_everything_ends_and_comes_back(server, make, method, fault):
    with ExitStack() as stack:
        engine = Engine(server, make)
        stack.callback(engine.scheduler.shutdown)
        wait_until(lambda: engine.works("before", 1), 20)
        if fault is None:
            server.hold[method] = threading.Event()
        else:
            server.fail[method] = fault
        # Has the calls made that only a start or a recovery makes.
        server.drop_registrations()
        engine.request("during", 2)
        engine.request("during too", 1)
        server.fail.clear()
        for hanging in server.hold.values():
            hanging.set()
        server.hold.clear()
        wait_until(engine.is_healthy, 20)
        wait_until(lambda: engine.works("after", 3), 20)


@pytest.mark.parametrize("method", ["NegotiateChunkSize", "RegisterKvCache", "Attach"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_start_into_a_fault_is_no_error_either(server, make, method, fault):
    if fault is None:
        server.hold[method] = threading.Event()
    else:
        server.fail[method] = fault
    with ExitStack() as stack:
        engine = Engine(server, lambda **options: make(start_wait=0.5, **options))
        stack.callback(engine.scheduler.shutdown)
        assert not engine.is_healthy()
        assert engine.scheduler.degraded_reason
        engine.request("during", 1)
        server.fail.clear()
        for hanging in server.hold.values():
            hanging.set()
        server.hold.clear()
        wait_until(engine.is_healthy, 20)
        wait_until(lambda: engine.works("after", 2), 20)
