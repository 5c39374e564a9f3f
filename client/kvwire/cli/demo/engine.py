"""One vLLM engine of the demo, in a process of its own: loads the model, answers one prompt, and ends."""

from __future__ import annotations

import time
from typing import Any

from kvwire.cli.demo.children import Reporter, arguments

# float32, because in bfloat16 vLLM's own prefix cache changes some outputs too; one process, one thread pool.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCHDYNAMO_DISABLE": "1",
}
BLOCK_SIZE = 32
KV_BYTES = 512 << 20
MAX_MODEL_LEN = 8192
BATCHED_TOKENS = 2048
FLUSH_S = 30.0


def model_length(model: str) -> int:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    positions = config.get_text_config().max_position_embeddings
    return min(MAX_MODEL_LEN, int(positions))


def start(task: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = task["kv_transfer"]
    length = model_length(task["model"])
    return LLM(
        model=task["model"],
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_SIZE,
        max_model_len=length,
        max_num_seqs=4,
        max_num_batched_tokens=min(BATCHED_TOKENS, length),
        kv_cache_memory_bytes=KV_BYTES,
        enable_prefix_caching=False,  # so that every token not computed here came from kvwire
        disable_log_stats=True,
        seed=0,
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
    )


def prompt_tokens(tokenizer: Any, text: str) -> list[int]:
    bos = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    return bos + list(tokenizer.encode(text, add_special_tokens=False))


def answer(engine: Any, name: str, tokens: list[int], max_tokens: int) -> dict[str, Any]:
    """Runs one request and times its first token, by stepping the engine as its server would."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    first_token_s = 0.0
    begin = time.perf_counter()
    engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
    output = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            if not first_token_s and output.outputs[0].token_ids:
                first_token_s = time.perf_counter() - begin
    if output is None:
        raise RuntimeError("the engine ended the request without an output")
    completion = output.outputs[0]
    return {
        "prompt_tokens": len(tokens),
        "cached_tokens": output.num_cached_tokens or 0,
        "first_token_s": first_token_s,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
    }


def flush(engine: Any) -> None:
    """Steps on until the connector lets go of the finished request's blocks, as an engine's server does."""
    scheduler = engine.engine_core.engine_core.scheduler
    deadline = time.monotonic() + FLUSH_S
    while scheduler.has_requests() and time.monotonic() < deadline:
        engine.step()
        time.sleep(0.001)


def main(reporter: Reporter, task: dict[str, Any]) -> None:
    reporter.tell(phase="loading vLLM and the model")
    llm = start(task)
    engine = llm.llm_engine
    tokens = prompt_tokens(llm.get_tokenizer(), task["prompt"])
    reporter.tell(phase=f"answering a prompt of {len(tokens):,} tokens")
    # The first tokens of a process pay for its memory and threads: some that nobody caches, off the clock.
    answer(engine, "warm-up", tokens[:BLOCK_SIZE], max_tokens=2)
    result = answer(engine, "document", tokens, task["max_tokens"])
    reporter.tell(phase="closing")
    flush(engine)
    engine.engine_core.shutdown()
    reporter.tell(result=result)


if __name__ == "__main__":
    main(*arguments())
