"""Real engines at several servers, and at one that the connector has started."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from e2e.harness import SHELF, Server, engine, transfer_config
from e2e.test_processes import FOUND, EngineProcess
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
def test_a_rank_at_each_server_and_one_of_them_is_restarted(pair, baseline):
    """With one server away the engine computes everything itself; it comes back by itself, empty."""
    right = [list(tokens) for tokens in baseline("llama", *PROMPTS)]
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    running = EngineProcess("llama", transfer_config(",".join(each.address for each in pair)), **options)
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


def test_a_server_that_the_engine_starts_stays_for_the_next_engine(short_tmp, baseline):
    address, folder = f"unix:{short_tmp}/kvwire.sock", short_tmp / "run"
    right = baseline("llama", *PROMPTS)
    extra = {
        "autostart": True,
        "autostart_l1_size": "16MiB",
        "autostart_flags": "--chunk-size 64",
        "autostart_folder": str(folder),
    }
    place = type("Place", (), {"address": address})
    pid = 0
    try:
        for cached in (NOTHING, FOUND):
            with engine("llama", place, extra=extra) as running:
                answers = running.run(*PROMPTS)
            pid = pid or int(ServerFiles.of(folder, address).lock.read_text())
            assert [answer.tokens for answer in answers] == right
            assert [answer.cached for answer in answers] == cached
            assert is_running(pid)
    finally:
        if pid:
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not Path(address.removeprefix("unix:")).exists()
