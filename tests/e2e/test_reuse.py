"""One engine stores, a fresh one finds it, and what it says does not change."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from e2e.harness import CHUNK, LENGTHS, SHELF, Answer, engine, expected, prompt

MODELS = ["llama", "gemma3", "gptoss"]


@pytest.mark.parametrize("model", MODELS)
def test_a_fresh_engine_finds_what_another_one_stored(model, library, baseline):
    right = baseline(model, *SHELF)
    with engine(model, library(model)) as second:
        free = second.free_blocks()
        answers = second.run(*SHELF)
        assert [answer.tokens for answer in answers] == right
        assert [answer.cached for answer in answers] == [expected(model, length) for length in LENGTHS]
        assert second.free_blocks() == free
        # Asking does not use it up.
        assert second.run(*SHELF) == answers


@pytest.mark.parametrize("model", MODELS)
def test_loaded_bytes_matter(model, library, baseline, monkeypatch):
    """The test of the tests: with zeroes in the place of what was loaded, every answer is another one."""
    prompts = SHELF[:4]
    right = baseline(model, *prompts)
    with engine(model, library(model)) as second:
        zero_what_is_loaded(second, monkeypatch)
        answers = second.run(*prompts)
    assert all(answer.cached > 0 for answer in answers)
    assert all(answer.tokens != tokens for answer, tokens in zip(answers, right, strict=True))


def zero_what_is_loaded(running, monkeypatch):
    worker = running.worker_connector._worker
    blocks = {}
    start_loads, collect = worker.side.start_loads, worker.side._collect

    def note(jobs, event):
        blocks.update((job.request_id, sorted(job.plan.block_ids)) for job in jobs)
        start_loads(jobs, event)

    def collect_zeroes(held):
        results = collect(held)
        for request_id in results.received:
            for view in (view for group in worker.views for view in group):
                view[blocks[request_id]] = 0
        return results

    monkeypatch.setattr(worker.side, "start_loads", note)
    monkeypatch.setattr(worker.side, "_collect", collect_zeroes)


def test_a_server_whose_memory_goes_bad_is_not_believed(server, baseline, caplog):
    """Zeroes in the server's memory: whoever checks what it reads computes it again."""
    prompts = SHELF[:4]
    right = baseline("gemma3", *prompts)
    # On this path the client makes the checksums; of what came by shared memory the server makes them later.
    inline = {"data_path": "inline"}
    with engine("gemma3", server, extra=inline) as first:
        first.run(*prompts)
    (arena,) = [
        path
        for path in Path("/dev/shm").glob("kvwire-*")
        if path.stat().st_size > 1 << 20 and owns(server, path)
    ]
    with arena.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(arena.stat().st_blocks * 512 - 4096))
    with engine("gemma3", server, extra=inline) as second:
        answers = second.run(*prompts)
        assert [answer.tokens for answer in answers] == right
    assert "checksum" in caplog.text


def owns(server, path):
    maps = Path(f"/proc/{server.pid}/maps").read_text()
    return path.name in maps


@pytest.mark.parametrize("model", MODELS)
def test_chunked_prefill(model, server, baseline):
    """Chunks are stored as they complete, over several steps, and found by an engine that does the same."""
    prompts = [prompt(length, seed=length) for length in (300, 200, 129, 65)]
    right = baseline(model, *prompts)
    for cached in ([0, 0, 0, 0], [256, 192, 128, 64]):
        with engine(model, server, max_num_batched_tokens=48) as running:
            answers = running.run(*prompts)
        assert [answer.tokens for answer in answers] == right
        assert [answer.cached for answer in answers] == cached


@pytest.mark.parametrize("model", MODELS)
def test_bl23_overlap_with_the_engines_own_prefix_cache(model, library, baseline):
    prompts = SHELF[:2]
    right = baseline(model, *prompts)
    with engine(model, library(model), enable_prefix_caching=True) as second:
        # They leave the shelf's prompts inside a chunk: the engine has three blocks of those afterwards.
        heads = [tokens[:110] + prompt(20, seed=1) for tokens in prompts]
        assert [answer.cached for answer in second.run(*heads)] == [CHUNK, CHUNK]
        answers = second.run(*prompts)
        assert [answer.tokens for answer in answers] == right
        assert [answer.cached for answer in answers] == [192, 128]
        # Now the engine has all of it itself, and the blocks in common have not been harmed.
        assert [answer.tokens for answer in second.run(*prompts)] == right
        assert all(answer.cached >= 96 for answer in second.run(*heads))


@pytest.mark.parametrize("model", MODELS)
def test_bl13_nothing_stays_leased(model, library):
    """Hits that were used, used in part, not needed at all, and of requests that were aborted on the way."""
    server = library(model)
    with engine(model, server, enable_prefix_caching=True) as running:
        running.run(*SHELF, salt="t1")
        running.run(SHELF[0][:110] + prompt(20, seed=1))
        running.run(*SHELF)
        running.run(*SHELF)
        for steps in range(4):
            running.abort_after(steps, *SHELF[:4], salt=f"t{steps}")
        server.assert_at_rest()
    server.assert_at_rest()


def test_a_longer_chunk_keeps_only_the_end_of_a_window(serve, baseline):
    """Chunks of 128 tokens, windows of 64: an object of a window group has half the blocks."""
    server = serve(chunk_size=128)
    prompts = [prompt(length, seed=length) for length in (300, 257, 256, 140)]
    right = baseline("gemma3", *prompts)
    for cached in ([0, 0, 0, 0], [256, 256, 128, 128]):
        with engine("gemma3", server) as running:
            answers = running.run(*prompts)
        assert [answer.tokens for answer in answers] == right
        assert [answer.cached for answer in answers] == cached


@pytest.mark.parametrize("path", ["inline", "ucx"])
def test_the_other_data_paths(path, server, baseline):
    prompts = SHELF[:4]
    right = baseline("gemma3", *prompts)
    for cached in ([0, 0, 0, 0], [192, 128, 64, 64]):
        with engine("gemma3", server, extra={"data_path": path}) as running:
            assert running.worker_connector._worker.adapter.data_path.startswith(path)
            answers = running.run(*prompts)
        assert [answer.tokens for answer in answers] == right
        assert [answer.cached for answer in answers] == cached


@pytest.mark.parametrize("path", ["shm", "ucx", "inline"])
def test_many_loads_at_once(path, server, baseline):
    """More than a worker has threads, or a path has messages under way."""
    prompts = [prompt(140, seed=seed) for seed in range(40)]
    right = baseline("llama", *prompts, max_num_seqs=40)
    begin = time.monotonic()
    for cached in (0, 128):
        with engine("llama", server, extra={"data_path": path}, max_num_seqs=40) as running:
            answers = running.run(*prompts)
        assert [answer.tokens for answer in answers] == right
        assert [answer.cached for answer in answers] == [cached] * len(prompts)
    assert time.monotonic() - begin < 25


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_a_kv_cache_of_eight_bits(model, server, baseline):
    fp8 = {"kv_cache_dtype": "fp8"}
    prompts = SHELF[:4]
    right = baseline(model, *prompts, **fp8)
    for cached in ([0, 0, 0, 0], [expected(model, len(tokens)) for tokens in prompts]):
        with engine(model, server, **fp8) as running:
            answers = running.run(*prompts)
            views = running.worker_connector._worker.views
            assert all(str(view.dtype) == "torch.uint8" for group in views for view in group)
        assert [answer.tokens for answer in answers] == right
        assert [answer.cached for answer in answers] == cached


def test_generated_tokens_are_reused_in_the_next_turn(server, baseline):
    first_turn = prompt(120)
    with engine("llama", server, extra={"save_decode": True}) as first:
        (answer,) = first.run(first_turn, num_tokens=80)
        second_turn = [*first_turn, *answer.tokens, 5, 6, 7]
        (answer,) = first.run(second_turn)
    assert answer == Answer(*baseline("llama", second_turn), 192, "length")


def test_requests_that_skip_the_cache_are_computed_and_stored(server, baseline):
    tokens = prompt(200)
    (right,) = baseline("llama", tokens)
    with engine("llama", server) as first:
        for _ in range(2):
            assert first.run(tokens, prompt_logprobs=1) == [Answer(right, 0, "length")]
        assert first.run(tokens) == [Answer(right, 192, "length")]
