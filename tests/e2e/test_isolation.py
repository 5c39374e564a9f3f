"""Who must not be served from whose KV, and who must."""

from __future__ import annotations

import json
import shutil

from e2e.harness import Answer, engine, prompt
from e2e.models import model_path

TOKENS = prompt(200)


def test_bl55_tenants_do_not_share(server, baseline):
    (right,) = baseline("llama", TOKENS)
    cached = []
    with engine("llama", server) as running:
        for salt in ("tenant-1", "tenant-2", None, "tenant-1", "tenant-2", None):
            (answer,) = running.run(TOKENS, salt=salt)
            assert answer.tokens == right
            cached.append(answer.cached)
    assert cached == [0, 0, 0, 192, 192, 192]
    with engine("llama", server) as other:
        assert [other.run(TOKENS, salt=salt)[0].cached for salt in ("tenant-1", "tenant-3")] == [192, 0]
    assert "tenant" not in server.log()
    assert "tenant" not in str(server.status())


def test_bl08_an_adapter_is_another_model(server, tmp_path):
    from vllm.lora.request import LoRARequest

    paths = [make_adapter(tmp_path / name, seed) for name, seed in (("one", 1), ("two", 2))]
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}

    def red(number, path):
        return LoRARequest("red", number, str(path))

    with engine("llama", server, **options) as first:
        plain, salted, one = (
            first.run(TOKENS, **who)[0] for who in ({}, {"salt": "red"}, {"lora": red(1, paths[0])})
        )
        assert (plain.cached, salted.cached, one.cached) == (0, 0, 0)
        assert plain.tokens == salted.tokens != one.tokens
    with engine("llama", server, **options) as second:
        # Another adapter of the same name, as after a reload.
        (two,) = second.run(TOKENS, lora=red(5, paths[1]))
        assert two.cached == 0
        assert two.tokens not in {plain.tokens, one.tokens}
        assert second.run(TOKENS, lora=red(7, paths[0])) == [Answer(one.tokens, 192, "length")]
        assert second.run(TOKENS) == [Answer(plain.tokens, 192, "length")]


def make_adapter(folder, seed):
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["k_proj", "o_proj"],
        "base_model_name_or_path": "tiny",
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {}
    for layer in range(2):
        for name, rows in (("k_proj", 64), ("o_proj", 128)):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = torch.randn(8, 128, generator=generator) * 0.3
            weights[f"{module}.lora_B.weight"] = torch.randn(rows, 8, generator=generator) * 0.3
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def test_weights_that_changed_are_another_model(server, tmp_path):
    """In a folder of the same name; and equal weights in two folders are one model, where that is said."""
    named = {"extra": {"model": "tiny"}}
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        shutil.copytree(model_path("llama"), folder)
    with engine(str(folders[0]), server, **named) as first:
        (right,) = first.run(TOKENS)
    with engine(str(folders[1]), server, **named) as second:
        assert second.run(TOKENS) == [Answer(right.tokens, 192, "length")]
    change_weights(folders[0] / "model.safetensors")
    with engine(str(folders[0]), server, **named) as third:
        (other,) = third.run(TOKENS)
        assert other.cached == 0
        assert other.tokens != right.tokens


def change_weights(file):
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    save_file({name: weight * 1.1 for name, weight in weights.items()}, file, metadata={"format": "pt"})


def test_engines_that_keep_other_bytes_do_not_share(server, baseline):
    (right,) = baseline("llama", TOKENS)
    with engine("llama", server) as first:
        first.run(TOKENS)
    with engine("llama", server, block_size=64) as second:
        assert second.run(TOKENS) == [Answer(right, 0, "length")]
    with engine("llama", server) as third:
        assert third.run(TOKENS)[0].cached == 192


def test_two_models_in_one_server(server, baseline):
    for model in ("llama", "gemma3"):
        with engine(model, server) as running:
            assert running.run(TOKENS)[0].cached == 0
    for model in ("llama", "gemma3"):
        (right,) = baseline(model, TOKENS)
        with engine(model, server) as running:
            assert running.run(TOKENS) == [Answer(right, 192, "length")]
