"""Real engines at several servers, and at one that the connector has started."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from e2e.harness import FOUND, SHELF, Server, engine, transfer_config
from e2e.processes import EngineProcess
from kvwire.vllm.autostart import ServerFiles, is_running

PROMPTS = SHELF[:4]
NOTHING = [0] * len(PROMPTS)


@pytest.fixture
def pair(short_tmp, engine_environment):
    servers = []
    for name in ("a", "b"):
        (short_tmp / name).mkdir()
        servers.append(Server(short_tmp / name))
    yield servers
    for server in servers:
        server.close()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_a_rank_at_each_server_and_one_of_them_is_restarted(model, pair, baseline):
    """With one server away the engine computes everything itself; it comes back by itself, empty."""
    right = [list(tokens) for tokens in baseline(model, *PROMPTS)]
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    running = EngineProcess(model, transfer_config(",".join(each.address for each in pair)), **options)
    try:
        running.start()
        for server in pair:
            assert sorted(each.kv_rank for each in server.status().registrations) == [0, 0]
        assert running.run(*PROMPTS) == {"tokens": right, "cached": NOTHING}
        assert running.run(*PROMPTS) == {"tokens": right, "cached": FOUND}
        pair[1].kill()
        assert running.run(*PROMPTS) == {"tokens": right, "cached": NOTHING}
        pair[1].start()
        deadline = time.monotonic() + 30
        while (answer := running.run(*PROMPTS))["cached"] != FOUND:
            assert answer["tokens"] == right
            assert time.monotonic() < deadline
        assert answer["tokens"] == right
        for server in pair:
            server.assert_at_rest()
    finally:
        running.close()


class Started:
    """What engines are told of servers that they are to start, and the servers that they have started."""

    def __init__(self, folder, count=1):
        self.folder = folder / "run"
        self.addresses = [f"unix:{folder}/{number}.sock" for number in range(count)]
        self.extra = {
            "autostart": True,
            "autostart_l1_size": "16MiB",
            "autostart_idle_exit": 120,
            "autostart_flags": "--chunk-size 64",
            "autostart_folder": str(self.folder),
        }

    @property
    def address(self):
        return ",".join(self.addresses)

    def pids(self):
        locks = [ServerFiles.of(self.folder, address).lock for address in self.addresses]
        return [int(lock.read_text()) for lock in locks if lock.exists()]

    def stop(self):
        for pid in self.pids():
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while any(is_running(pid) for pid in self.pids()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not any(Path(address.removeprefix("unix:")).exists() for address in self.addresses)


def test_a_server_that_the_engine_starts_stays_for_the_next_engine(short_tmp, baseline):
    right = baseline("llama", *PROMPTS)
    started = Started(short_tmp)
    seen = []
    try:
        for cached in (NOTHING, FOUND):
            with engine("llama", started, extra=started.extra) as running:
                answers = running.run(*PROMPTS)
            assert [answer.tokens for answer in answers] == right
            assert [answer.cached for answer in answers] == cached
            assert is_running(*started.pids())
            seen += started.pids()
        assert seen[0] == seen[1]
    finally:
        started.stop()


@pytest.mark.slow
@pytest.mark.long
def test_an_engine_of_several_processes_starts_one_server_for_each_address(short_tmp, baseline):
    """Scheduler and workers come at the same time, and end without taking the servers with them."""
    right = [list(tokens) for tokens in baseline("llama", *PROMPTS)]
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    started = Started(short_tmp, count=2)
    seen = []
    try:
        for cached in (NOTHING, FOUND):
            running = EngineProcess("llama", transfer_config(started.address, **started.extra), **options)
            try:
                running.start()
                assert running.run(*PROMPTS) == {"tokens": right, "cached": cached}
            finally:
                running.close()
            seen.append(started.pids())
        assert seen[0] == seen[1]
        assert len(set(seen[0])) == 2
    finally:
        started.stop()
