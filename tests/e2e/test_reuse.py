"""One engine stores, a fresh one finds it, and what it says does not change."""

from __future__ import annotations

import pytest

from e2e.harness import BLOCK, CHUNK, Answer, engine, prompt

MODELS = ["llama", "gemma3", "gptoss"]
LENGTHS = (200, 137, 96, 65, 3 * CHUNK, 3 * CHUNK + 1, 3 * CHUNK - 1, CHUNK, CHUNK - 1, 40)
PROMPTS = [prompt(length, seed=length) for length in LENGTHS]


def expected(model, length):
    """What a fresh engine finds of a prompt that is stored as a whole."""
    if model == "llama":
        found = length // CHUNK * CHUNK
        return found if found < length else found - BLOCK
    return (length - 1) // CHUNK * CHUNK


@pytest.mark.parametrize("model", MODELS)
def test_a_fresh_engine_finds_what_another_one_stored(model, server, baseline):
    right = baseline(model, *PROMPTS)
    with engine(model, server) as first:
        answers = first.run(*PROMPTS)
        assert [answer.tokens for answer in answers] == right
        assert [answer.cached for answer in answers] == [0] * len(PROMPTS)
    with engine(model, server) as second:
        free = second.free_blocks()
        answers = second.run(*PROMPTS)
        assert [answer.tokens for answer in answers] == right
        assert [answer.cached for answer in answers] == [expected(model, length) for length in LENGTHS]
        assert second.free_blocks() == free
        # What was found once is found again, and asking did not use it up.
        assert [answer.cached for answer in second.run(*PROMPTS)] == [answer.cached for answer in answers]


@pytest.mark.parametrize("model", MODELS)
def test_loaded_bytes_matter(model, server, baseline, monkeypatch):
    """The test of the tests: with zeroes in the place of what was loaded, every answer is another one."""
    prompts = PROMPTS[:4]
    right = baseline(model, *prompts)
    with engine(model, server) as first:
        first.run(*prompts)
    with engine(model, server) as second:
        zero_what_is_loaded(second, monkeypatch)
        answers = second.run(*prompts)
    assert all(answer.cached > 0 for answer in answers)
    assert all(answer.tokens != tokens for answer, tokens in zip(answers, right, strict=True))


def zero_what_is_loaded(running, monkeypatch):
    worker = running.worker_connector._worker
    blocks = {}
    start_loads, collect = worker.side.start_loads, worker.side._collect

    def note(jobs):
        blocks.update((job.request_id, sorted(job.plan.block_ids)) for job in jobs)
        start_loads(jobs)

    def collect_zeroes(held):
        results = collect(held)
        for request_id in results.received:
            for group in worker.views:
                for view in group:
                    view[blocks[request_id]] = 0
        return results

    monkeypatch.setattr(worker.side, "start_loads", note)
    monkeypatch.setattr(worker.side, "_collect", collect_zeroes)


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
def test_bl23_overlap_with_the_engines_own_prefix_cache(model, server, baseline):
    prompts = [prompt(length, seed=length) for length in (300, 200, 137)]
    right = baseline(model, *prompts)
    with engine(model, server) as first:
        first.run(*prompts)
    with engine(model, server, enable_prefix_caching=True) as second:
        # Another ending makes a prompt that only the engine itself has beyond the chunks in common.
        heads = [tokens[:110] + prompt(20, seed=1) for tokens in prompts]
        second.run(*heads)
        answers = second.run(*prompts)
        assert [answer.tokens for answer in answers] == right
        assert [answer.cached for answer in answers] == [256, 192, 128]
        # Now the engine has it all, and the blocks it shares were not harmed.
        answers = second.run(*prompts)
        assert [answer.tokens for answer in answers] == right
        assert second.run(*heads)[0].cached >= 96


def test_a_longer_chunk_keeps_only_the_end_of_a_window(serve, baseline):
    """Chunks of 128 tokens, windows of 64: an object of a window group has half the blocks."""
    server = serve("--chunk-size", "128")
    prompts = [prompt(length, seed=length) for length in (300, 257, 256, 140)]
    right = baseline("gemma3", *prompts)
    for cached in ([0, 0, 0, 0], [256, 256, 128, 128]):
        with engine("gemma3", server) as running:
            answers = running.run(*prompts)
        assert [answer.tokens for answer in answers] == right
        assert [answer.cached for answer in answers] == cached


@pytest.mark.parametrize("path", ["inline", "ucx"])
def test_the_other_data_paths(path, server, baseline):
    prompts = PROMPTS[:4]
    right = baseline("gemma3", *prompts)
    for cached in ([0, 0, 0, 0], [192, 128, 64, 64]):
        with engine("gemma3", server, extra={"data_path": path}) as running:
            assert running.worker_connector._worker.adapter.data_path.startswith(path)
            answers = running.run(*prompts)
        assert [answer.tokens for answer in answers] == right
        assert [answer.cached for answer in answers] == cached


def test_generated_tokens_are_reused_in_the_next_turn(server, baseline):
    first_turn = prompt(120)
    with engine("llama", server, extra={"save_decode": True}) as first:
        (answer,) = first.run(first_turn, num_tokens=80)
    second_turn = [*first_turn, *answer.tokens, 5, 6, 7]
    (right,) = baseline("llama", second_turn)
    with engine("llama", server) as second:
        (answer,) = second.run(second_turn)
    assert answer.tokens == right
    assert answer.cached == 192


def test_requests_that_skip_the_cache_are_computed_and_stored(server, baseline):
    tokens = prompt(200)
    (right,) = baseline("llama", tokens)
    with engine("llama", server) as first:
        for _ in range(2):
            assert first.run(tokens, prompt_logprobs=1) == [Answer(right, 0, "length")]
        (again,) = first.run(tokens)
    assert (again.tokens, again.cached) == (right, 192)
