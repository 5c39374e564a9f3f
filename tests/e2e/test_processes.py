"""Engines in processes of their own: two that share a server, and one that is spread over two workers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.harness import SHELF, transfer_config

PROGRAM = Path(__file__).with_name("engine_process.py")
FOUND = [192, 128, 64, 64]


class EngineProcess:
    """Runs `engine_process.py`: one line of JSON in, one out."""

    def __init__(self, model, transfer, **options):
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._tell({"model": model, "transfer": transfer, "options": options})

    def start(self):
        assert self._hear() == "ready"

    def run(self, *prompts):
        self._tell(list(prompts))
        return self._hear()

    def close(self):
        self._process.stdin.close()
        try:
            assert self._process.wait(60) == 0
        finally:
            self._process.kill()
            self._process.stdout.close()

    def _tell(self, what):
        self._process.stdin.write(json.dumps(what) + "\n")

    def _hear(self):
        while line := self._process.stdout.readline():
            if line.startswith("> "):
                return json.loads(line[2:])
        raise EOFError(f"the engine ended with {self._process.wait(10)}")


@pytest.fixture
def process():
    running = []

    def start(*args, **options):
        running.append(EngineProcess(*args, **options))
        return running[-1]

    yield start
    for each in running:
        each.close()


def test_two_engines_at_once_share_what_they_compute(server, baseline, process):
    prompts = SHELF[:4]
    right = [list(tokens) for tokens in baseline("gemma3", *prompts)]
    first, second = (process("gemma3", transfer_config(server.address)) for _ in range(2))
    first.start()
    second.start()
    assert first.run(*prompts) == {"tokens": right, "cached": [0, 0, 0, 0]}
    assert second.run(*prompts) == {"tokens": right, "cached": FOUND}


@pytest.mark.slow
def test_a_tensor_parallel_engine_keeps_a_shard_per_rank(server, baseline, process):
    """Two workers, each with its own registration; a hit needs the shards of both."""
    prompts = SHELF[:4]
    right = [list(tokens) for tokens in baseline("llama", *prompts)]
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    engine = process("llama", transfer_config(server.address), **options)
    engine.start()
    for cached in ([0, 0, 0, 0], FOUND):
        assert engine.run(*prompts) == {"tokens": right, "cached": cached}
    assert sorted(each.kv_rank for each in server.status().registrations) == [0, 0, 1]
