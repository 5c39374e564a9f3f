"""What must be equal before KV may be shared: the engine's namespace, and what a request adds to it."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvwire.client.fingerprint import digest_of
from kvwire.keys import ExtraInput, Namespace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvwire.vllm.config import ConnectorConfig
    from kvwire.vllm.layout import EngineLayout

_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SAMPLE_BYTES: Final = 64 << 10
_MAX_SESSION_BYTES: Final = 256
_SPEC_FIELDS: Final = (
    "block_size",
    "page_size_bytes",
    "dtype",
    "kv_quant_mode",
    "cache_dtype_str",
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "num_head_slots",
    "state_content_bytes",
    "tokens_per_state",
    "sliding_window",
    "attention_chunk_size",
    "sink_len",
    "shapes",
    "dtypes",
    "mamba_type",
)


@dataclass(frozen=True, slots=True)
class AdapterId:
    """A LoRA adapter in a namespace. Both empty: the base model."""

    name: str = ""
    revision: str = ""


def engine_namespace(
    config: ConnectorConfig, vllm_config: Any, kv_cache_config: Any, layout: EngineLayout
) -> Namespace:
    """The namespace of one engine, without adapter and salt. Equal in its scheduler and all its workers."""
    model = vllm_config.model_config
    dtype = vllm_config.cache_config.cache_dtype
    facts = {
        **_memory_facts(kv_cache_config, layout, vllm_config.parallel_config),
        **_parallel_facts(vllm_config.parallel_config),
        **_platform_facts(),
        **_model_facts(model),
    }
    return Namespace(
        model=_name(config.model or str(model.model)),
        revision=_name(_revision(model)),
        kv_dtype=str(model.dtype if dtype == "auto" else dtype).removeprefix("torch."),
        layout_fingerprint=digest_of(facts),
    )


def adapter_of(lora_request: Any) -> AdapterId:
    """Its name, and a digest of where it is and of its weights: retrained, it is another one."""
    if lora_request is None:
        return AdapterId()
    path = str(lora_request.lora_path)
    digest = sha256(path.encode())
    digest.update(weights_digest(Path(path)))
    return AdapterId(_name(str(lora_request.lora_name)), digest.hexdigest()[:32])


def extra_inputs(mm_features: Iterable[Any]) -> tuple[ExtraInput, ...]:
    """Images and other inputs of a prompt: the digest of the content's whole name, and where it stands."""
    return tuple(
        ExtraInput(
            digest=sha256(str(feature.identifier).encode()).digest(),
            start=feature.mm_position.offset,
            length=feature.mm_position.length,
        )
        for feature in mm_features
    )


def session_id(request_id: str) -> str:
    """The server's name of a request: its own id, or a digest of one that is too long."""
    if len(request_id.encode()) <= _MAX_SESSION_BYTES:
        return request_id
    return sha256(request_id.encode()).hexdigest()


def weights_digest(folder: Path) -> bytes:
    """A digest of the names, sizes, heads and tails of the weight files; empty where there is no such folder.

    New weights differ everywhere, so their ends tell them apart without reading gigabytes.
    """
    if not folder.is_dir():
        return b""
    digest = sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in _WEIGHT_SUFFIXES and path.is_file():
            with path.open("rb") as file:
                head = file.read(_SAMPLE_BYTES)
                size = file.seek(0, 2)
                file.seek(max(0, size - _SAMPLE_BYTES))
                tail = file.read(_SAMPLE_BYTES)
            for part in (path.name.encode(), str(size).encode(), head, tail):
                digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _memory_facts(kv_cache_config: Any, layout: EngineLayout, parallel: Any) -> dict[str, Any]:
    # All stages of a pipeline have one namespace, and the scheduler knows the first one's layers only.
    in_stages = parallel.pipeline_parallel_size > 1
    return {
        "kv_cache_layout": kv_cache_config.kv_cache_layout,
        "groups": [
            {
                "kind": group.kind.name,
                "span": group.span_tokens,
                "window": group.window_tokens,
                "layers": len(group.layer_names) if in_stages else group.layer_names,
                "pages": group.page_bytes,
                "spec": _spec_facts(kv_cache_config.kv_cache_groups[group.engine_index].kv_cache_spec),
            }
            for group in layout.groups
        ],
    }


def _spec_facts(spec: Any) -> dict[str, str]:
    # Where layers of a group differ, the engine's scheduler is told of the first one alone.
    per_layer = getattr(spec, "kv_cache_specs", None)
    first = spec if per_layer is None else next(iter(per_layer.values()))
    return {
        "type": type(first).__name__,
        **{name: str(getattr(first, name, None)) for name in _SPEC_FIELDS},
    }


def _parallel_facts(parallel: Any) -> dict[str, Any]:
    return {
        "world_size": parallel.world_size,
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "decode_context_parallel": parallel.decode_context_parallel_size,
        "interleave": getattr(parallel, "cp_kv_cache_interleave_size", 1),
    }


def _platform_facts() -> dict[str, Any]:
    import torch
    import vllm
    from vllm.platforms import current_platform

    facts: dict[str, Any] = {"device": current_platform.device_type, "vllm": vllm.__version__}
    if current_platform.is_cpu():
        # On a CPU the inside of a page is packed for the instruction set.
        facts["isa"] = [
            torch.backends.cpu.get_cpu_capability(),
            torch.cpu._is_amx_tile_supported(),  # noqa: SLF001  what the engine itself asks
        ]
    return facts


def _model_facts(model: Any) -> dict[str, Any]:
    config = model.hf_text_config.to_dict()
    ignored = {"transformers_version", "_name_or_path", "_commit_hash", "torch_dtype", "dtype"}
    return {
        "architecture": {name: value for name, value in config.items() if name not in ignored},
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "weights": weights_digest(Path(str(model.model))).hex(),
    }


def _revision(model: Any) -> str:
    # A hub's branch moves; the commit that was downloaded does not.
    return str(getattr(model.hf_config, "_commit_hash", None) or model.revision or "")


def _name(text: str) -> str:
    """Text as a namespace takes it: a path that is longer is named by its digest."""
    if len(text.encode()) <= 512 and text.isprintable():
        return text
    return sha256(text.encode()).hexdigest()
