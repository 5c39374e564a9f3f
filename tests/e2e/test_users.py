"""What users ask for: per request, at the end of one, of a whole conversation, and of the cache."""

from __future__ import annotations

import time

import msgspec

from e2e.harness import BLOCK, CHUNK, NUM_TOKENS, engine, prompt

FRESH = iter(range(1000, 2000))


def fresh(num_tokens):
    """A prompt that no test has asked before."""
    return prompt(num_tokens, seed=next(FRESH))


def ask(running, *prompts, num_tokens=NUM_TOKENS, **params):
    """The raw outputs, and what each says of kvwire."""
    from vllm import SamplingParams

    given = {"kv_transfer_params": {f"kvwire.{name}": value for name, value in params.items()}}
    sampling = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, extra_args=given
    )
    outputs = running._llm.generate(
        [{"prompt_token_ids": tokens} for tokens in prompts], sampling, use_tqdm=False
    )
    running.settle()
    return outputs


def told(output):
    return output.kv_transfer_params["kvwire"]


def metrics(running):
    found = {}
    for metric in running._llm.get_metrics():
        if metric.name.startswith("vllm:kvwire_"):
            found[metric.name.removeprefix("vllm:kvwire_")] = getattr(metric, "value", None) or getattr(
                metric, "count", 0
            )
    return found


def test_requests_engines_and_the_cache_do_as_they_are_told(server, caplog):
    with engine("llama", server, disable_log_stats=False) as running:
        requests_say_what_they_want(running, server, caplog)
        generated_tokens_are_found_in_the_next_turn(running)
        a_request_is_looked_up_when_it_arrives(running, server)
        a_reset_reaches_the_server(running, server)
        the_engine_counts(running)
        assert running.run(fresh(40))[0].cached == 0
        server.assert_at_rest()


def requests_say_what_they_want(running, server, caplog):
    tokens = fresh(200)
    (first,) = ask(running, tokens, stats=True)
    assert told(first) == {
        "prompt_tokens": 200,
        "engine_cached_tokens": 0,
        "found_tokens": 0,
        "loaded_tokens": 0,
        "stored_tokens": 192,
        "reason": "nothing found",
    }
    (again,) = ask(running, tokens, stats=True)
    assert (told(again)["loaded_tokens"], told(again)["reason"]) == (192, "")
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    (silent,) = ask(running, tokens)
    assert silent.kv_transfer_params is None
    (off,) = ask(running, tokens, load=False, stats=True)
    assert (off.num_cached_tokens, told(off)["reason"]) == (0, "switched off by the request")
    (limited,) = ask(running, tokens, max_hit_tokens=CHUNK + 1, stats=True)
    assert limited.num_cached_tokens == told(limited)["loaded_tokens"] == CHUNK
    other = fresh(200)
    (unstored,) = ask(running, other, store=False, stats=True)
    assert told(unstored)["stored_tokens"] == 0
    assert ask(running, other)[0].num_cached_tokens == 0
    (wrong,) = ask(running, tokens, laod=False, max_hit_tokens="all", stats=True)
    assert told(wrong)["loaded_tokens"] == 192
    (warning,) = [record.getMessage() for record in caplog.records if "kv_transfer_params" in record.msg]
    assert "kvwire.laod" in warning
    assert "kvwire.max_hit_tokens" in warning


def generated_tokens_are_found_in_the_next_turn(running):
    """A turn of 3 x 32 generated tokens, then a second one that begins with all of the first."""
    for save, found in ((False, CHUNK), (True, 3 * CHUNK)):
        tokens = fresh(100)
        (turn,) = ask(running, tokens, num_tokens=100, save_decode=save)
        following = [*tokens, *turn.outputs[0].token_ids, *fresh(30)]
        (second,) = ask(running, following, stats=True)
        assert second.num_cached_tokens == told(second)["loaded_tokens"] == found
        (right,) = ask(running, following, load=False)
        assert right.outputs[0].token_ids == second.outputs[0].token_ids


def a_request_is_looked_up_when_it_arrives(running, server):
    from vllm import SamplingParams

    before = server.status().counters.lookups
    llm = running._llm.llm_engine
    asked = llm.add_request("early", {"prompt_token_ids": fresh(200)}, SamplingParams(detokenize=False))
    deadline = time.monotonic() + 10
    while server.status().counters.lookups == before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    # The engine has not made a step yet.
    llm.abort_request([asked], internal=True)
    running.settle()
    server.assert_at_rest()


def a_reset_reaches_the_server(running, server):
    tokens = fresh(200)
    ask(running, tokens)
    assert server.status().memory.chunks > 0
    assert running._llm.reset_prefix_cache(reset_connector=True)
    assert server.status().memory.chunks == 0
    assert ask(running, tokens)[0].num_cached_tokens == 0
    (right,) = ask(running, tokens)
    assert right.num_cached_tokens == 192
    server.pause()
    try:
        assert not running._llm.reset_prefix_cache(reset_connector=True)
    finally:
        server.resume()
    assert ask(running, tokens)[0].outputs[0].token_ids == right.outputs[0].token_ids


def the_engine_counts(running):
    found = metrics(running)
    assert found["lookups"] > 10
    assert found["lookup_asked_tokens"] > found["lookup_hit_tokens"] >= found["loaded_tokens"] > 5 * 192
    assert found["loaded_bytes"] == found["loaded_tokens"] // BLOCK * 16384 * 2
    assert found["stored_bytes"] > 0
    assert found["loads"] == found["load_seconds"]
    assert found["lookup_seconds"] >= found["lookups"]
    assert found["failed_loads"] == 0


class Subscriber:
    """Reads the engine's own ZeroMQ stream, as a router does."""

    def __init__(self, endpoint):
        import zmq

        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, "")
        self._socket.connect(endpoint)
        self.gpu, self.kvwire = {}, {}

    def read(self, until):
        """Take events until what they say is so."""
        from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch

        decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        deadline = time.monotonic() + 20
        while not until(self):
            assert time.monotonic() < deadline, (len(self.gpu), len(self.kvwire))
            if not self._socket.poll(100):
                yield
                continue
            for event in decoder.decode(self._socket.recv_multipart()[2]).events:
                if isinstance(event, AllBlocksCleared):
                    self.gpu.clear()
                    continue
                held = self.kvwire if event.medium == "KVWIRE" else self.gpu
                for index, block in enumerate(event.block_hashes):
                    if isinstance(event, BlockStored):
                        size = event.block_size
                        held[block] = event.token_ids[index * size : (index + 1) * size]
                    else:
                        held.pop(block, None)

    def close(self):
        self._socket.close()


def blocks_of(*prompts):
    """The blocks of whole chunks."""
    return [
        tokens[start : start + BLOCK]
        for tokens in prompts
        for start in range(0, len(tokens) // CHUNK * CHUNK, BLOCK)
    ]


def test_a_router_sees_what_the_server_holds(server, short_tmp):
    from vllm.config import KVEventsConfig

    earlier, tokens = fresh(137), fresh(200)
    endpoint = f"ipc://{short_tmp}/events"
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
    options = {"enable_prefix_caching": True, "kv_events_config": config}
    subscriber = Subscriber(endpoint)
    with engine("llama", server) as before:
        before.run(earlier)
    with engine("llama", server, **options) as running:

        def until(condition):
            for _ in subscriber.read(condition):
                # Events leave an engine with its steps.
                running.run(fresh(BLOCK + 1), num_tokens=1)

        # A subscriber misses what is published before it has joined.
        until(lambda seen: seen.gpu)
        running.run(tokens)
        until(lambda seen: len(seen.kvwire) == len(blocks_of(tokens)))
        # The same block has the same hash, wherever it lies.
        assert sorted(subscriber.kvwire.values()) == sorted(blocks_of(tokens))
        assert all(subscriber.gpu[block] == found for block, found in subscriber.kvwire.items())
        # What was there before this engine is told when a request of this engine names it.
        assert running.run(earlier)[0].cached == 2 * CHUNK
        until(lambda seen: len(seen.kvwire) == len(blocks_of(tokens, earlier)))
        running.run(fresh(CHUNK + 1), salt="secret")
        assert running._llm.reset_prefix_cache(reset_connector=True)
        until(lambda seen: not seen.kvwire)
        running.run(tokens)
        until(lambda seen: len(seen.kvwire) == len(blocks_of(tokens)))
        server.kill()
        until(lambda seen: not seen.kvwire)
        assert len(subscriber.gpu) >= len(blocks_of(tokens))
    subscriber.close()


def test_lazy_stores_what_the_engine_is_about_to_drop(server, baseline):
    """64 blocks, of which a prompt takes 7: the first one is dropped after eight others."""
    first, others = fresh(200), [fresh(200) for _ in range(12)]
    right, *expected = baseline("llama", first, *others)
    options = {"enable_prefix_caching": True, "kv_cache_memory_bytes": 64 * 2 * 16384, "max_num_seqs": 2}
    with engine("llama", server, extra={"lazy": True}, **options) as running:
        free = running.free_blocks()
        assert running.run(first)[0].tokens == right
        assert running.run(first)[0].cached == 192
        assert server.status().counters.stored_objects == 0
        assert [running.run(tokens)[0].tokens for tokens in others] == expected
        assert server.status().counters.stored_objects >= 3
        (again,) = ask(running, first, stats=True)
        assert tuple(again.outputs[0].token_ids) == right
        assert told(again)["engine_cached_tokens"] == 0
        assert told(again)["loaded_tokens"] == 192
        assert running.free_blocks() == free
        # All at once: more than the engine has room for.
        assert [answer.tokens for answer in running.run(*others)] == expected
        assert running.free_blocks() == free
        server.assert_at_rest()
        server.pause()
        try:
            # Copies hang, and hold a quarter of the blocks: the rest is enough to go on with.
            assert [answer.tokens for answer in running.run(*others[::-1])] == expected[::-1]
        finally:
            server.resume()
        until_free(running, free)
        server.kill()
        assert [answer.tokens for answer in running.run(*others)] == expected
        until_free(running, free)


def until_free(running, wanted):
    deadline = time.monotonic() + 40
    while running.free_blocks() != wanted:
        assert time.monotonic() < deadline, running.free_blocks()
        running.run(fresh(3), num_tokens=1)
