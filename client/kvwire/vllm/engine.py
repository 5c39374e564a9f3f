"""Reads an engine's configuration: its KV cache groups, and what cannot be cached."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvwire.client.layout import GroupKind
from kvwire.errors import LayoutUnsupported
from kvwire.vllm.layout import CacheGroup, EngineLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# In the others a block's bytes do not lie together.
BLOCK_COMPACT_LAYOUTS: Final = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
_NO_STATES: Final = (
    "it keeps recurrent state (Mamba, linear attention) only for the last token; with prefix caching "
    "(--enable-prefix-caching) the engine keeps it at block boundaries too, where it can be cached"
)
_STAGES: Final = "its pipeline stages differ in more than the number of equal layers"


def read_layout(vllm_config: Any, kv_cache_config: Any) -> EngineLayout:
    """The cacheable groups of an engine. Raises LayoutUnsupported, saying why, for one to refuse."""
    _check_engine(vllm_config, kv_cache_config)
    layout = str(kv_cache_config.kv_cache_layout or BLOCK_COMPACT_LAYOUTS[0])
    pages = _placed_pages(kv_cache_config, layout.startswith("B"))
    indices = kv_cache_config.prefix_cacheable_group_ids
    if not indices:
        raise _unsupported("none of its KV cache groups can be cached")
    in_stages = vllm_config.parallel_config.pipeline_parallel_size > 1
    if in_stages and any(not kv_cache_config.kv_cache_groups[index].layer_names for index in indices):
        raise _unsupported(f"{_STAGES}: one has no layer of some KV cache group")
    groups = tuple(
        read_group(vllm_config, index, kv_cache_config.kv_cache_groups[index], pages) for index in indices
    )
    if in_stages:
        groups = (as_stage(vllm_config, groups),)
    return EngineLayout(
        groups=groups,
        num_engine_groups=len(kv_cache_config.kv_cache_groups),
        num_blocks=kv_cache_config.num_blocks,
        world_size=vllm_config.parallel_config.world_size,
        block_major=layout.startswith("B"),
        replicas=getattr(kv_cache_config, "kv_tp_replicas", 1),
    )


def read_group(vllm_config: Any, index: int, group: Any, pages: Mapping[str, int]) -> CacheGroup:
    """One KV cache group of the engine. `pages` are the sizes of pages as far as they are known by layer."""
    if getattr(group, "host_resident", False):
        raise _unsupported(f"KV cache group {index} lives in host memory")
    specs = _layer_specs(group)
    kind, window = _kind(index, group.kv_cache_spec, specs)
    sharded = getattr(group.kv_cache_spec, "dcp_sharded", False)
    dcp = vllm_config.parallel_config.decode_context_parallel_size if sharded else 1
    return CacheGroup(
        engine_index=index,
        kind=kind,
        span_tokens=group.kv_cache_spec.block_size * dcp,
        layer_names=tuple(group.layer_names),
        page_bytes=tuple(
            _page_bytes(spec, pages.get(name)) for name, spec in zip(group.layer_names, specs, strict=True)
        ),
        window_tokens=window,
        is_local=bool(getattr(specs[0], "attention_chunk_size", None)) and window > 0,
    )


def _check_engine(vllm_config: Any, kv_cache_config: Any) -> None:
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or current_platform.is_cuda_alike()):
        raise _unsupported(f"there is no way to copy blocks of a {current_platform.device_type} device")
    parallel = vllm_config.parallel_config
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise _unsupported("prefill context parallelism spreads the tokens of a block over ranks")
    model = vllm_config.model_config
    if model.is_encoder_decoder:
        raise _unsupported("an encoder-decoder model keeps KV that its decoder's tokens do not determine")
    if (
        model.use_mla
        and current_platform.is_cpu()
        and not vllm_config.scheduler_config.enable_chunked_prefill
    ):
        raise _unsupported(
            "latent attention (MLA) on this CPU ignores KV that is already there and computes wrong output"
        )
    layout = kv_cache_config.kv_cache_layout
    if layout is not None and layout not in BLOCK_COMPACT_LAYOUTS:
        raise _unsupported(
            f"in the KV cache layout {layout} a block is scattered; set VLLM_KV_CACHE_LAYOUT to one of "
            + ", ".join(BLOCK_COMPACT_LAYOUTS)
        )


def _layer_specs(group: Any) -> list[Any]:
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if per_layer is None:
        return [group.kv_cache_spec] * len(group.layer_names)
    return [per_layer[name] for name in group.layer_names]


def _kind(index: int, group_spec: Any, specs: list[Any]) -> tuple[GroupKind, int]:
    from vllm.v1.kv_cache_interface import KVCacheSpecKind, RSWASpec, get_kv_cache_spec_kind

    kind = get_kv_cache_spec_kind(group_spec)
    if kind is KVCacheSpecKind.MAMBA:
        if any(spec.mamba_cache_mode != "align" for spec in specs):
            raise _unsupported(f"KV cache group {index}: {_NO_STATES}")
        return GroupKind.RECURRENT, 0
    if any(isinstance(spec, RSWASpec) or getattr(spec, "non_causal", False) for spec in specs):
        raise _unsupported(f"KV cache group {index}: its KV depends on more than the tokens before it")
    if kind in {
        KVCacheSpecKind.FULL_ATTENTION,
        KVCacheSpecKind.MLA_ATTENTION,
        KVCacheSpecKind.SINK_FULL_ATTENTION,
    }:
        return GroupKind.FULL_ATTENTION, 0
    if kind in {KVCacheSpecKind.SLIDING_WINDOW, KVCacheSpecKind.SLIDING_WINDOW_MLA}:
        # Some drafters keep a few tokens more than the window.
        return GroupKind.SLIDING_WINDOW, _one(
            index, (spec.sliding_window + spec.extra_retained_tokens for spec in specs)
        )
    if kind is KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION:
        # Attention reaches back to the last multiple of the size.
        return GroupKind.SLIDING_WINDOW, _one(index, (spec.attention_chunk_size for spec in specs))
    raise _unsupported(f"KV cache group {index} is of the kind {getattr(kind, 'value', kind)}")


def _placed_pages(kv_cache_config: Any, block_major: bool) -> dict[str, int]:
    """The page of every layer, by where the engine puts it.

    The engine's scheduler is told of one specification in a group where its workers may have several.
    """
    return {
        name: tensor.layer_stride if block_major else tensor.block_stride
        for tensor in kv_cache_config.kv_cache_tensors
        for name in tensor.layers
    }


def _page_bytes(spec: Any, placed: int | None) -> int:
    if hasattr(spec, "mamba_cache_mode"):
        # A state is padded to the page of an attention block, often to twice its size.
        return int(spec.real_page_size_bytes)
    return int(placed or spec.page_size_bytes)


def as_stage(vllm_config: Any, groups: tuple[CacheGroup, ...]) -> CacheGroup:
    """The group of one pipeline stage, made as long as that of the longest stage: shards have one size.

    A shorter stage repeats its last layer, which is stored and loaded twice. Raises LayoutUnsupported where
    the scheduler, which sees the first stage alone, could not know the sizes of the others.
    """
    from vllm.distributed.utils import get_pp_indices

    parallel = vllm_config.parallel_config
    stages = parallel.pipeline_parallel_size
    total = vllm_config.model_config.get_total_num_hidden_layers()
    spans = [get_pp_indices(total, stage, stages) for stage in range(stages)]
    lengths = [end - begin for begin, end in spans]
    group = groups[0]
    own = lengths[parallel.rank // parallel.tensor_parallel_size]
    if len(groups) > 1 or len(set(group.page_bytes)) > 1 or len(group.layer_names) != own:
        raise _unsupported(_STAGES)
    missing = max(lengths) - own
    return replace(
        group,
        layer_names=group.layer_names + group.layer_names[-1:] * missing,
        page_bytes=group.page_bytes + group.page_bytes[-1:] * missing,
    )


def _one(index: int, windows: Iterable[int]) -> int:
    sizes = set(windows)
    if len(sizes) != 1:
        raise _unsupported(f"the layers of KV cache group {index} have the windows {sorted(sizes)}")
    return sizes.pop()


def _unsupported(why: str) -> LayoutUnsupported:
    return LayoutUnsupported(f"kvwire cannot cache the KV of this engine: {why}.", problem=why)
