"""One vLLM engine of `kvwire bench engine`, in a process of its own, which may have another environment.

So nothing of kvwire is imported here. Orders come as lines of JSON on standard input, answers go to the
descriptor that is named first; the process ends with its standard input.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from typing import Any

FLUSH_S = 30.0


def start(task: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = task["kv_transfer"]
    return LLM(
        model=task["model"],
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        block_size=task["block_size"],
        max_model_len=task["max_model_len"],
        max_num_seqs=8,
        max_num_batched_tokens=max(2048, task["max_model_len"]),
        kv_cache_memory_bytes=task["kv_bytes"],
        enable_prefix_caching=False,  # so that every token not computed here came from the connector
        disable_hybrid_kv_cache_manager=task["one_group"] or None,
        disable_log_stats=True,
        seed=0,
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
    )


class Engine:
    """Steps the engine itself, as its server would."""

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._count = 0

    def answer(self, tokens: list[int], max_tokens: int) -> dict[str, Any]:
        """One request by itself: the time to its first token, what it said, and the time until the connector
        let go of it, which is when all of it was stored."""
        begin = time.perf_counter()
        self._add(tokens, max_tokens)
        first_token_s = 0.0
        output: Any = None
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if not first_token_s and output.outputs[0].token_ids:
                    first_token_s = time.perf_counter() - begin
        self._flush()
        return {
            "first_token_s": first_token_s,
            "settled_s": time.perf_counter() - begin,
            "cached_tokens": output.num_cached_tokens or 0,
            "token_ids": list(output.outputs[0].token_ids),
        }

    def burst(self, prompts: list[list[int]], short: list[list[int]], count: int) -> dict[str, Any]:
        """Prompts that come together while other requests generate: their mean time to the first token, and
        the longest step that the others waited for meanwhile."""
        running = [self._add(tokens, count) for tokens in short]
        self._step_until_all_started(running)
        begin = time.perf_counter()
        waiting = {self._add(tokens, 1) for tokens in prompts}
        seconds: list[float] = []
        longest = 0.0
        while waiting:
            before = time.perf_counter()
            outputs = self._engine.step()
            now = time.perf_counter()
            longest = max(longest, now - before)
            for each in outputs:
                if each.request_id in waiting and each.outputs[0].token_ids:
                    waiting.discard(each.request_id)
                    seconds.append(now - begin)
        self._engine.abort_request(running, internal=False)
        self._flush()
        return {"first_token_s": sum(seconds) / len(seconds), "longest_step_s": longest}

    def round(self, prompts: list[list[int]], max_tokens: int, in_flight: int) -> dict[str, Any]:
        """All prompts, at most `in_flight` at once: the time from the start of each to its first token, the
        time for all, what was said, and how many tokens were not computed here."""
        begin = time.perf_counter()
        waiting = list(enumerate(prompts))
        started: dict[str, tuple[int, float]] = {}
        first: dict[int, float] = {}
        said: dict[int, list[int]] = {}
        cached = 0
        while waiting or started:
            while waiting and len(started) < in_flight:
                number, tokens = waiting.pop(0)
                started[self._add(tokens, max_tokens)] = (number, time.perf_counter())
            for each in self._engine.step():
                number, since = started[each.request_id]
                if each.outputs[0].token_ids:
                    first.setdefault(number, time.perf_counter() - since)
                if each.finished:
                    del started[each.request_id]
                    said[number] = list(each.outputs[0].token_ids)
                    cached += each.num_cached_tokens or 0
        seconds = time.perf_counter() - begin
        self._flush()
        order = range(len(prompts))
        return {
            "first_token_s": [first[number] for number in order],
            "seconds": seconds,
            "token_ids": [said[number] for number in order],
            "cached_tokens": cached,
        }

    def steps(self, prompts: list[list[int]], count: int) -> dict[str, Any]:
        """`count` steps that generate one token for each prompt, timed from when all have their first."""
        self._step_until_all_started([self._add(tokens, count + 8) for tokens in prompts])
        begin = time.perf_counter()
        for _ in range(count):
            self._engine.step()
        seconds = time.perf_counter() - begin
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._flush()
        return {"steps_per_s": count / seconds}

    def close(self) -> dict[str, Any]:
        self._engine.engine_core.shutdown()
        return {}

    def _step_until_all_started(self, names: list[str]) -> None:
        started: set[str] = set()
        while len(started) < len(names):
            started |= {each.request_id for each in self._engine.step() if each.outputs[0].token_ids}

    def _add(self, tokens: list[int], max_tokens: int) -> str:
        from vllm import SamplingParams

        self._count += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        name = str(self._count)
        self._engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
        return name

    def _flush(self) -> None:
        """Until the connector has let go of the blocks: the next request must find what this one stored."""
        deadline = time.monotonic() + FLUSH_S
        while self._scheduler.has_requests() and time.monotonic() < deadline:
            self._engine.step()
            time.sleep(0.001)


def hide_llvmlite() -> None:
    """vLLM looks into every module for its kernels' names, and llvmlite's library has any name it is asked
    for: such an engine dies at start. LMCache brings llvmlite, and neither of them is changed here."""
    with contextlib.suppress(ImportError, AttributeError):
        ffi = importlib.import_module("llvmlite.binding.ffi")
        library = type(ffi.lib)
        find = library.__getattr__

        def find_symbols(self: Any, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return find(self, name)

        library.__getattr__ = find_symbols


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "w") as answers:

        def tell(answer: dict[str, Any]) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        engine: Engine | None = None
        for line in sys.stdin:
            order = json.loads(line)
            name = order.pop("do")
            if name == "start":
                hide_llvmlite()
                engine = Engine(start(order))
                tell({})
            else:
                tell(getattr(engine, name)(**order) if engine is not None else {})


if __name__ == "__main__":
    main()
