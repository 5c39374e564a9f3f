"""Recurrent state: of a prompt the state at the end of its last chunk, beside the KV of its attention layers.

The engine runs in bfloat16, which is what this model can do on a CPU, and computes one prompt at a time: text
depends on what is computed together then.
"""

from __future__ import annotations

import pytest

from e2e.harness import BLOCK, CHUNK, LENGTHS, SHELF, Engine, Server, engine, prompt, transfer_config
from e2e.processes import EngineProcess
from e2e.test_preemption import count_preemptions
from e2e.test_reuse import zero_what_is_loaded

MODEL = "qwen3_next"
OPTIONS = {
    "dtype": "bfloat16",
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 256 << 20,
    "max_num_seqs": 1,
}


def boundary(length):
    """The last end of a chunk that leaves a token to compute."""
    return (length - 1) // CHUNK * CHUNK


def expected(prompts):
    return [boundary(len(tokens)) for tokens in prompts]


def running(server, **options):
    return engine(MODEL, server, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def filled(engine_environment, tmp_path_factory):
    """A server in which an engine has stored the shelf."""
    server = Server(tmp_path_factory.mktemp("kvw"))
    with running(server) as first:
        assert [answer.cached for answer in first.run(*SHELF)] == [0] * len(SHELF)
    yield server
    server.close()


def test_bl25_a_fresh_engine_finds_what_another_one_stored(filled, baseline):
    """Prompts of exactly some chunks, of one token more and of one less among them."""
    right = baseline(MODEL, *SHELF, **OPTIONS)
    with running(filled) as second:
        free = second.free_blocks()
        answers = second.run(*SHELF)
        assert second.free_blocks() == free
    assert [answer.tokens for answer in answers] == right
    assert [answer.cached for answer in answers] == [boundary(length) for length in LENGTHS]
    filled.assert_at_rest()


def test_loaded_bytes_matter(filled, baseline, monkeypatch):
    """The test of the tests: with zeroes in the place of what was loaded, every answer is another one."""
    prompts = SHELF[:4]
    right = baseline(MODEL, *SHELF, **OPTIONS)
    with running(filled) as second:
        zero_what_is_loaded(second, monkeypatch)
        answers = second.run(*prompts)
    assert [answer.cached for answer in answers] == expected(prompts)
    assert all(answer.tokens != tokens for answer, tokens in zip(answers, right, strict=False))


def test_only_the_state_at_the_boundary_moves(filled):
    """Of a prompt of three chunks: their KV, and one state of each of the three recurrent groups."""
    with running(filled) as second:
        connector = second.scheduler_connector
        plans = []
        load_plan = connector._scheduler.side._load_plan
        connector._scheduler.side._load_plan = lambda *args: plans.append(load_plan(*args)) or plans[-1]
        second.run(SHELF[0])
    (plan,) = plans
    assert [(each.first_chunk, each.chunk_count) for each in plan.groups] == [(2, 1)] * 3 + [(0, 3)]
    assert len(plan.block_ids) == 3 + 3 * CHUNK // BLOCK


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_failed_load(policy, filled, baseline, monkeypatch):
    prompts = SHELF[:4]
    right = baseline(MODEL, *SHELF, **OPTIONS)
    with running(filled, policy=policy) as second:
        free = second.free_blocks()
        adapter = second.worker_connector._worker.adapter
        submit = adapter.submit_retrieve_request

        def submit_nonsense(request_id, op, event=None):
            if op.chunk_count == boundary(len(prompts[0])) // CHUNK:
                raise RuntimeError("no")
            return submit(request_id, op, event)

        monkeypatch.setattr(adapter, "submit_retrieve_request", submit_nonsense)
        with monkeypatch.context() as quiet:
            quiet.setattr("kvwire.vllm.worker.logger.exception", lambda *args: None)
            answers = second.run(*prompts)
        assert second.free_blocks() == free
    if policy == "fail":
        assert answers[0].reason == "error"
    else:
        assert answers[0].tokens == right[0]
    assert [answer.tokens for answer in answers[1:]] == right[1:4]
    assert [answer.cached for answer in answers[1:]] == expected(prompts[1:])
    filled.assert_at_rest()


def test_chunked_prefill(server, baseline):
    """A prefill that is cut by the engine's limit leaves a state where it ends; the last chunk counts."""
    prompts = [prompt(length, seed=length) for length in (300, 257, 256, 255, 130)]
    right = baseline(MODEL, *prompts, max_num_batched_tokens=96, **OPTIONS)
    for cached in ([0] * len(prompts), expected(prompts)):
        with running(server, max_num_batched_tokens=96) as each:
            answers = each.run(*prompts)
        assert [answer.tokens for answer in answers] == right
        assert [answer.cached for answer in answers] == cached


def test_a_turn_continues_from_the_one_before(server, baseline):
    """Each turn finds the state of the last one, in an engine that has not seen it."""
    tokens = prompt(420)
    turns = [tokens[:length] for length in (140, 280, 420)]
    right = baseline(MODEL, *turns, **OPTIONS)
    for turn, tokens_of, cached in zip(turns, right, (0, 128, 256), strict=True):
        with running(server) as each:
            (answer,) = each.run(turn)
        assert (answer.tokens, answer.cached) == (tokens_of, cached)


def test_a_prefix_in_common(server, baseline):
    """Its state is kept when the engine sees it for the second time, where a chunk ends; all find it then."""
    prompts = [prompt(150) + prompt(length, seed=length) for length in (100, 90, 80, 70)]
    right = baseline(MODEL, *prompts, **OPTIONS)
    with running(server) as first:
        answers = first.run(*prompts[:2])
    with running(server) as second:
        answers += second.run(*prompts[2:])
    assert [answer.tokens for answer in answers] == right
    assert [answer.cached for answer in answers] == [0, 0, 128, 128]
    with running(server) as third:
        again = third.run(*prompts)
    assert [answer.tokens for answer in again] == right
    assert [answer.cached for answer in again] == [192, 128, 192, 192]


def test_generated_tokens_are_reused_in_the_next_turn(server, baseline):
    first_turn = prompt(120)
    with running(server, extra={"save_decode": True}) as first:
        (answer,) = first.run(first_turn, num_tokens=80)
    second_turn = [*first_turn, *answer.tokens, 5, 6, 7]
    with running(server) as second:
        (found,) = second.run(second_turn)
    assert found.cached == 192
    (right,) = baseline(MODEL, second_turn, **OPTIONS)
    assert found.tokens == right


def test_bl23_overlap_with_the_engines_own_prefix_cache(filled, baseline):
    """The engine has a state of its own inside a chunk, and another one that the server never got."""
    right = baseline(MODEL, *SHELF, **OPTIONS)
    with running(filled) as second:
        head = SHELF[0][:110] + prompt(20, seed=1)
        second.run(head)
        assert second.run(head)[0].cached == 128
        (answer,) = second.run(SHELF[0])
        assert (answer.tokens, answer.cached) == (right[0], 192)
        (answer,) = second.run(SHELF[0])
        assert (answer.tokens, answer.cached) == (right[0], 192)
    filled.assert_at_rest()


def test_a_state_that_only_the_engine_has_is_stored_again(serve, baseline, short_tmp):
    """A server that has lost everything gets the state that the engine resumes from."""
    server = serve()
    tokens = SHELF[0]
    (right,) = baseline(MODEL, tokens, **OPTIONS)
    with running(server) as first:
        first.run(tokens)
        assert server.status().memory.objects
        first.scheduler_connector.reset_cache()
        assert not server.status().memory.objects
        (answer,) = first.run(tokens)
        assert (answer.tokens, answer.cached) == (right, 192)
    with running(server) as second:
        (answer,) = second.run(tokens)
    assert (answer.tokens, answer.cached) == (right, 192)


@pytest.mark.parametrize("chunk_size", [BLOCK, 2 * CHUNK])
def test_chunks_of_one_block_and_of_four(chunk_size, serve, baseline):
    server = serve(chunk_size=chunk_size)
    prompts = SHELF[:6]
    right = baseline(MODEL, *SHELF, **OPTIONS)
    for _ in range(2):
        with running(server) as each:
            answers = each.run(*prompts)
        assert [answer.tokens for answer in answers] == right[: len(prompts)]
    found = [(len(tokens) - 1) // chunk_size * chunk_size for tokens in prompts]
    assert [answer.cached for answer in answers] == found


def test_short_convolutions(serve, baseline):
    """Chunks of one block: on a CPU this model's text depends on where its prefill is cut."""
    server = serve(chunk_size=BLOCK)
    options = {**OPTIONS, "dtype": "float32"}
    right = baseline("lfm2", *SHELF, **options)
    for _ in range(2):
        with engine("lfm2", server, **options) as each:
            answers = each.run(*SHELF)
        assert [answer.tokens for answer in answers] == right
    assert [answer.cached for answer in answers] == [(length - 1) // BLOCK * BLOCK for length in LENGTHS]


def test_bytes_come_back_as_they_were(server):
    """Requests side by side, in fewer blocks than they need: some are preempted, blocks change their owners.

    Text of bfloat16 depends on the company then, so the bytes are compared: those in the engine when a step
    had ended with those in another engine when a load had.
    """
    prompts = [prompt(length, seed=length) for length in range(90, 330, 15)]
    busy = {"max_num_seqs": 8, "num_gpu_blocks_override": 60, "max_num_batched_tokens": 256}
    with running(server, **busy) as first:
        written = stored_bytes(first)
        preempted = count_preemptions(first)
        first.run(*prompts, num_tokens=40)
    assert preempted
    with running(server) as second:
        read = loaded_bytes(second)
        answers = second.run(*prompts)
    assert [answer.cached for answer in answers] == expected(prompts)
    assert len({name for name in read if name[1] != 3}) == 3 * len(prompts)
    assert all(read[name] in written[name] for name in read)


def objects_of(job, views):
    """The bytes of a job's objects, by prompt, group and chunk."""
    number = job.request_id.split("-")[0]
    for each in job.plan.groups:
        for chunk in range(each.first_chunk, each.first_chunk + each.chunk_count):
            rows = [view[list(each.blocks_of(chunk))].numpy().tobytes() for view in views[each.group_index]]
            yield (number, each.group_index, chunk), b"".join(rows)


def stored_bytes(running):
    """What was in the blocks of each store when its step had ended, of prompts computed twice both."""
    worker, written = running.worker_connector._worker, {}
    start_stores = worker.side.start_stores

    def note(jobs, event):
        for job in jobs:
            for name, content in objects_of(job, worker.views):
                written.setdefault(name, []).append(content)
        start_stores(jobs, event)

    worker.side.start_stores = note
    return written


def loaded_bytes(running):
    worker, jobs, read = running.worker_connector._worker, {}, {}
    start_loads, collect = worker.side.start_loads, worker.side._collect

    def note(loads, event):
        jobs.update((job.request_id, job) for job in loads)
        start_loads(loads, event)

    def collect_bytes(held):
        results = collect(held)
        for request_id in results.received:
            read.update(objects_of(jobs[request_id], worker.views))
        return results

    worker.side.start_loads, worker.side._collect = note, collect_bytes
    return read


def test_lazy_stores_keep_states_with_their_chunks(server):
    """In fewer blocks than the prompts need: what was dropped is found with its state, byte for byte."""
    prompts = [prompt(length, seed=length) for length in range(130, 330, 10)]
    with running(server, extra={"lazy": True}, num_gpu_blocks_override=40) as first:
        written = stored_bytes(first)
        first.run(*prompts)
    assert len({name for name in written if name[1] != 3}) > 3 * len(prompts) // 2
    with running(server) as second:
        read = loaded_bytes(second)
        answers = second.run(*prompts)
    found = sum(answer.cached == most for answer, most in zip(answers, expected(prompts), strict=True))
    assert found > len(prompts) // 2
    assert len({name for name in read if name[1] != 3}) >= 3 * found
    assert set(read.values()) <= {content for contents in written.values() for content in contents}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
def test_each_rank_keeps_its_part_of_a_state(server):
    """Tensor parallel: heads of the state are spread over two workers. The text is that of the same engine
    without kvwire, since sums are rounded in another order than in one worker."""
    prompts = SHELF[:6]
    options = {**OPTIONS, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    runs = []
    for transfer in (None, *[transfer_config(server.address)] * 2):
        each = EngineProcess("qwen3_next_wide", transfer, **options)
        try:
            each.start()
            runs.append(each.run(*prompts))
        finally:
            each.close()
    assert [run["tokens"] for run in runs] == [runs[0]["tokens"]] * 3
    assert [run["cached"] for run in runs] == [[0] * 6, [0] * 6, expected(prompts)]
    server.assert_at_rest()


def test_without_prefix_caching_there_is_no_state_to_cache(server):
    from vllm.distributed import cleanup_dist_env_and_memory

    from kvwire.errors import LayoutUnsupported

    try:
        with pytest.raises(LayoutUnsupported, match="--enable-prefix-caching"):
            Engine(MODEL, transfer_config(server.address), dtype="bfloat16")
    finally:
        cleanup_dist_env_and_memory()
