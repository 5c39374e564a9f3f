"""The models of `kvwire bench engine`. Those with random weights say nonsense, at the speed of their size."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvwire.cli.demo import children
from kvwire.cli.demo.model import cache_dir, locked, prepare_model
from kvwire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

GEMMA: Final = "gemma"
_MADE: Final = "kvwire-bench.json"
_COMMON: Final = {
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
RANDOM: Final[dict[str, dict[str, Any]]] = {
    # One KV group of full attention, about 100 million weights: 36 KiB of KV per token in float32.
    "llama": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "head_dim": 64,
        **_COMMON,
    },
    # Starts in seconds, and its step is so short that whatever a connector does shows.
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        **_COMMON,
    },
}


@dataclass(frozen=True, slots=True)
class Model:
    """`vocabulary`: how many token ids it knows."""

    name: str
    folder: Path
    vocabulary: int


def prepare(name: str, progress: Callable[[str], None]) -> Model:
    """`name` is "gemma", one of RANDOM, or a folder in Hugging Face's format."""
    if name == GEMMA:
        folder = prepare_model(lambda what, _share: progress(f"{GEMMA}: {what}"))
    elif name in RANDOM:
        folder = _random_model(name, progress)
    else:
        folder = Path(name)
        if not (folder / "config.json").is_file():
            known = ", ".join((GEMMA, *RANDOM))
            raise ConfigError(f"--model {name} is neither {known} nor a model's folder.", setting="model")
    return Model(name if folder != Path(name) else folder.name, folder, _vocabulary(folder))


def _vocabulary(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config") or config
    return int(text["vocab_size"])


def _random_model(name: str, progress: Callable[[str], None]) -> Path:
    """Made once; made anew when this program describes it differently."""
    models = cache_dir() / "models"
    models.mkdir(parents=True, exist_ok=True)
    folder = models / f"bench-{name}"
    with locked(models / f"bench-{name}.lock"):
        if not _is_made(folder, RANDOM[name]):
            progress(f"making the model {name}")
            shutil.rmtree(folder, ignore_errors=True)
            task = {"folder": str(folder), "config": RANDOM[name]}
            log = models / f"bench-{name}.log"
            children.run(__name__, task, log, lambda _event: None, {"HF_HUB_OFFLINE": "1"})
            (folder / _MADE).write_text(json.dumps(RANDOM[name]))
            log.unlink()
    return folder


def _is_made(folder: Path, config: dict[str, Any]) -> bool:
    try:
        return bool(json.loads((folder / _MADE).read_text()) == config)
    except (OSError, ValueError):
        return False


def make(folder: str, config: dict[str, Any]) -> None:
    """In a process of its own: torch and its memory end with it."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    model = AutoModelForCausalLM.from_config(LlamaConfig(**config), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1234)
    spread = 0.12 * (128 / config["hidden_size"]) ** 0.5
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    model.save_pretrained(folder)


if __name__ == "__main__":
    _reporter, order = children.arguments()
    make(order["folder"], order["config"])
