"""Engines that go by one name and keep other bytes, at one server: none ever sees what another one stored."""

from __future__ import annotations

import pytest

from e2e.harness import CHUNK, Answer, engine, prompt

TOKENS = prompt(200)
FOUND = 200 // CHUNK * CHUNK
KINDS = {
    "float32": ("llama", {}),
    "bfloat16": ("llama", {"dtype": "bfloat16"}),
    "fp8": ("llama", {"kv_cache_dtype": "fp8"}),
    "blocks": ("llama", {"block_size": CHUNK}),
    "windows": ("gemma3", {}),
    "windows as full attention": ("gemma3", {"disable_hybrid_kv_cache_manager": True}),
    "states": ("qwen3_next", {"dtype": "bfloat16", "enable_prefix_caching": True}),
}


@pytest.mark.timeout(300)
def test_engines_of_one_name_do_not_share_other_bytes(server, baseline):
    right = {kind: baseline(model, TOKENS, **options)[0] for kind, (model, options) in KINDS.items()}
    for cached in (0, FOUND):
        for kind, (model, options) in KINDS.items():
            with engine(model, server, extra={"model": "the same"}, **options) as each:
                assert each.run(TOKENS) == [Answer(right[kind], cached, "length")], kind
