"""Tiny models with fixed random weights, a few megabytes each, made once and kept in build/e2e-models.

What they say is nonsense, but it depends on every token before: KV that is wrong changes it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

VOCABULARY = 512
WINDOW = 64
"""The sliding window, in tokens, of the models that have one."""

_HOME = Path(__file__).parents[2] / "build" / "e2e-models"
_VERSION = 1
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _qwen3_next(width):
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        num_hidden_layers=4,
        linear_num_key_heads=width,
        linear_num_value_heads=width,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        **{
            **_COMMON,
            "num_attention_heads": 4 * width,
            "num_key_value_heads": 4 * width,
            # As large as to make a block of 32 tokens hold a state.
            "head_dim": 256,
        },
    )


def _configs():
    from transformers import (
        DeepseekV2Config,
        Gemma3TextConfig,
        GptOssConfig,
        Lfm2Config,
        LlamaConfig,
    )

    return {
        "llama": lambda: LlamaConfig(num_hidden_layers=2, **_COMMON),
        # One layer in two looks back over a window only: two KV groups.
        "gemma3": lambda: Gemma3TextConfig(
            num_hidden_layers=4,
            sliding_window=WINDOW,
            query_pre_attn_scalar=32,
            layer_types=["sliding_attention", "full_attention"] * 2,
            **_COMMON,
        ),
        # Windows, attention sinks, mixture of experts.
        "gptoss": lambda: GptOssConfig(
            num_hidden_layers=4,
            sliding_window=WINDOW,
            num_local_experts=2,
            num_experts_per_tok=1,
            **_COMMON,
        ),
        # Recurrent state (gated delta net) in three layers of four; twice as wide, for two workers.
        "qwen3_next": lambda: _qwen3_next(1),
        "qwen3_next_wide": lambda: _qwen3_next(2),
        # Short convolutions, whose state is a few tokens long, in one layer of two.
        "lfm2": lambda: Lfm2Config(
            num_hidden_layers=4,
            layer_types=["conv", "full_attention"] * 2,
            conv_L_cache=3,
            conv_dim=128,
            block_dim=128,
            block_ff_dim=256,
            block_multiple_of=32,
            block_auto_adjust_ff_dim=False,
            block_ffn_dim_multiplier=1.0,
            **_COMMON,
        ),
        # Latent attention, which the connector refuses on a CPU.
        "deepseek": lambda: DeepseekV2Config(
            num_hidden_layers=2,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_rope_head_dim=64,
            qk_nope_head_dim=64,
            v_head_dim=64,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            first_k_dense_replace=2,
            **{**_COMMON, "num_key_value_heads": 4},
        ),
    }


def model_path(name: str) -> str:
    """The folder of a model, which is made on first use."""
    path = _HOME / f"{name}-{_VERSION}"
    if not (path / "complete").exists():
        shutil.rmtree(path, ignore_errors=True)
        _make(name, path)
        (path / "complete").touch()
    return str(path)


def _make(name: str, path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(_configs()[name](), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1234)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.12)
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    assert config["vocab_size"] == VOCABULARY


def tokenizer_path() -> str:
    """A tokenizer for all of them: token n is the word "wn", so that what a model says is text."""
    path = _HOME / f"words-{_VERSION}"
    if not (path / "complete").exists():
        shutil.rmtree(path, ignore_errors=True)
        _make_tokenizer(path)
        (path / "complete").touch()
    return str(path)


def _make_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w1", eos_token="w2", pad_token="w0"
    )
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text('{"model_type": "llama"}')
