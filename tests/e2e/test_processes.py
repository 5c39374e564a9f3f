"""Engines in processes of their own: two that share a server, and one that is spread over two workers."""

from __future__ import annotations

import os
import signal

import pytest

from e2e.harness import FOUND, SHELF, Answer, engine, transfer_config
from support.waiting import eventually


def test_two_engines_at_once_share_what_they_compute(server, baseline, process):
    prompts = SHELF[:4]
    right = [list(tokens) for tokens in baseline("gemma3", *prompts)]
    first, second = (process("gemma3", transfer_config(server.address)) for _ in range(2))
    first.start()
    second.start()
    assert first.run(*prompts) == {"tokens": right, "cached": [0, 0, 0, 0]}
    assert second.run(*prompts) == {"tokens": right, "cached": FOUND}


def stalling_config(server, folder, rank):
    """A connector whose rank stops in the middle of a store, and where it says its process id then."""
    file = folder / f"stalled-{rank}"
    transfer = transfer_config(server.address)
    transfer["kv_connector_module_path"] = "e2e.stalling"
    transfer["kv_connector_extra_config"] |= {"stall.rank": rank, "stall.file": str(file)}
    return transfer, file


def stalled(file):
    return eventually(lambda: file.exists() and file.read_text(), within=60)


def everybody_gone(server):
    return not server.status().registrations


@pytest.mark.parametrize("path", ["shm", "inline"])
def test_bl19_an_engine_is_killed_in_the_middle_of_a_store(path, server, baseline, process, tmp_path):
    """kill -9 of scheduler and worker at once: nothing of it is found, and nothing of it is left."""
    tokens = SHELF[0]
    (right,) = baseline("gemma3", tokens)
    transfer, file = stalling_config(server, tmp_path, 0)
    transfer["kv_connector_extra_config"]["kvwire.data_path"] = path
    dying = process("gemma3", transfer)
    dying.start()
    dying.tell(tokens)
    stalled(file)
    assert server.status().leases.write == 1
    dying.kill()
    dying.end()
    eventually(lambda: everybody_gone(server))
    server.assert_at_rest()
    assert server.status().memory.used_bytes == 0
    with engine("gemma3", server) as following:
        assert [following.run(tokens)[0] for _ in range(2)] == [
            Answer(right, cached, "length") for cached in (0, 192)
        ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tensor_parallel_engine_keeps_a_shard_per_rank(server, baseline, process, tmp_path):
    """Two workers, each with its own registration; a hit needs the shards of both.

    Of a first engine one rank is killed in the middle of a store that the other one has done: the engine
    ends, and what it has left in the server is half and found by nobody.
    """
    prompts = SHELF[:4]
    right = [list(tokens) for tokens in baseline("llama", *prompts)]
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    transfer, file = stalling_config(server, tmp_path, 1)
    dying = process("llama", transfer, **options)
    dying.start()
    dying.tell(*prompts)
    os.kill(int(stalled(file)), signal.SIGKILL)
    assert dying.end() != 0
    eventually(lambda: everybody_gone(server))
    server.assert_at_rest()
    assert server.status().memory.used_bytes > 0
    following = process("llama", transfer_config(server.address), **options)
    following.start()
    found = following.run(*prompts)
    # Prompts of one chunk may have been stored by both ranks before.
    assert found["tokens"] == right
    assert found["cached"][:2] == [0, 0]
    assert following.run(*prompts) == {"tokens": right, "cached": FOUND}
    assert sorted(each.kv_rank for each in server.status().registrations) == [0, 0, 1]
