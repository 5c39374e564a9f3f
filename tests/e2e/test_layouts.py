"""vLLM's own descriptions of KV cache groups, as the connector reads them. No engine is started."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvwire.client.layout import GroupKind
from kvwire.errors import LayoutUnsupported
from kvwire.vllm.config import ConnectorConfig
from kvwire.vllm.engine import read_layout
from kvwire.vllm.identity import engine_namespace

pytestmark = pytest.mark.usefixtures("engine_environment")

BLOCK = 16
SHAPE = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64}


def attention(kind="FullAttentionSpec", **fields):
    import torch
    from vllm.v1 import kv_cache_interface

    return getattr(kv_cache_interface, kind)(**{**SHAPE, "dtype": torch.bfloat16, **fields})


def recurrent(mode="align", **fields):
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    shape = {"block_size": BLOCK, "shapes": ((16,), (4, 4)), "dtypes": (torch.bfloat16, torch.float32)}
    return MambaSpec(**{**shape, **fields}, mamba_cache_mode=mode)


def several(**specs):
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    return UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs)


def cache_config(*specs, layout="LBHNC"):
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    groups = [
        KVCacheGroupSpec([*getattr(spec, "kv_cache_specs", (f"a{i}", f"b{i}"))], spec)
        for i, spec in enumerate(specs)
    ]
    return KVCacheConfig(100, [], groups, kv_cache_layout=layout)


def engine_config(*, model=None, scheduler=None, kv_dtype="auto", **parallel):
    sizes = {
        "world_size": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "rank": 0,
    }
    architecture = SimpleNamespace(to_dict=lambda: {"layers": 2, "transformers_version": "1"})
    described = {
        "model": "tiny",
        "revision": None,
        "dtype": "torch.bfloat16",
        "quantization": None,
        "is_encoder_decoder": False,
        "use_mla": False,
        "hf_config": architecture,
        "hf_text_config": architecture,
        "get_total_num_hidden_layers": lambda: 4,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**described, **(model or {})}),
        cache_config=SimpleNamespace(cache_dtype=kv_dtype),
        parallel_config=SimpleNamespace(**{**sizes, **parallel}),
        scheduler_config=SimpleNamespace(**{"enable_chunked_prefill": True, **(scheduler or {})}),
    )


def test_full_attention():
    layout = read_layout(engine_config(world_size=4), cache_config(attention()))
    (group,) = layout.groups
    assert (group.kind, group.span_tokens, group.window_tokens) == (GroupKind.FULL_ATTENTION, BLOCK, 0)
    assert group.page_bytes == (BLOCK * 2 * 64 * 2 * 2,) * 2
    assert (layout.world_size, layout.alignment, layout.block_major) == (4, BLOCK, False)
    (group,) = layout.kv_layout(64).groups
    assert (group.num_layers, group.blocks_per_object) == (2, 4)


def test_windows():
    layout = read_layout(
        engine_config(),
        cache_config(
            attention(),
            attention("SlidingWindowSpec", sliding_window=33, extra_retained_tokens=2),
            attention("ChunkedLocalAttentionSpec", attention_chunk_size=32, block_size=32),
        ),
    )
    assert [group.window_tokens for group in layout.groups] == [0, 35, 32]
    assert [group.is_local for group in layout.groups] == [False, False, True]
    assert layout.alignment == 32
    assert [group.blocks_per_object for group in layout.kv_layout(128).groups] == [8, 3, 1]


def test_recurrent_state_without_its_padding():
    """The engine pads a state to the page of an attention block; only the state itself moves."""
    layout = read_layout(engine_config(), cache_config(recurrent(page_size_padded=4096), attention()))
    state, _ = layout.groups
    assert (state.kind, state.span_tokens, state.page_bytes) == (GroupKind.RECURRENT, BLOCK, (96, 96))
    (state, _) = layout.kv_layout(64).groups
    assert (state.blocks_per_object, state.window_tokens) == (1, 0)


def test_bl28_only_attention_is_spread_by_decode_context_parallelism():
    layout = read_layout(
        engine_config(decode_context_parallel_size=2), cache_config(attention(), recurrent())
    )
    assert [group.span_tokens for group in layout.groups] == [2 * BLOCK, BLOCK]
    assert layout.alignment == 2 * BLOCK


def test_decode_context_parallelism_makes_blocks_longer():
    layout = read_layout(engine_config(decode_context_parallel_size=4), cache_config(attention()))
    assert layout.alignment == 4 * BLOCK
    layout = read_layout(
        engine_config(decode_context_parallel_size=4), cache_config(attention(dcp_sharded=False))
    )
    assert layout.alignment == BLOCK


def test_layers_of_different_sizes():
    layout = read_layout(engine_config(), cache_config(several(a=attention(), b=attention(num_kv_heads=4))))
    (group,) = layout.groups
    assert group.layer_names == ("a", "b")
    assert group.page_bytes[1] == 2 * group.page_bytes[0]
    assert layout.kv_layout(64).groups[0].num_layers == 1


def test_the_scheduler_is_told_of_one_of_several_sizes():
    """vLLM's scheduler knows one layer's specification; where the layers lie tells it the size of all."""
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
    from vllm.v1.kv_cache_interface import KVCacheTensor

    workers = cache_config(several(a=attention(), b=attention(num_kv_heads=4), c=attention()))
    page = attention().page_size_bytes
    workers.kv_cache_tensors = [
        KVCacheTensor(0, ["a", "c"], layer_stride=100 * page, block_stride=page),
        KVCacheTensor(0, ["b"], layer_stride=200 * page, block_stride=2 * page),
    ]
    schedulers = generate_scheduler_kv_cache_config([workers])
    layouts = [read_layout(engine_config(), each) for each in (workers, schedulers)]
    assert layouts[0] == layouts[1]
    assert layouts[0].groups[0].page_bytes == (page, 2 * page, page)
    assert namespace(cache=workers) == namespace(cache=schedulers)


def test_replicated_latent_attention_is_one_shard():
    """Every tensor parallel rank holds the same bytes of a latent cache: four workers, one shard."""
    import torch
    from vllm.v1.core.kv_cache_utils import kv_cache_groups_tp_replicas
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, max_tp_shards=1
    )
    config = cache_config(spec)
    config.kv_tp_replicas = kv_cache_groups_tp_replicas(config.kv_cache_groups, 4)
    layout = read_layout(engine_config(world_size=4, tensor_parallel_size=4), config)
    assert layout.groups[0].kind is GroupKind.FULL_ATTENTION
    assert [layout.kv_rank(rank) for rank in range(4)] == [0, 0, 0, 0]
    assert (layout.world_size, layout.kv_layout(64).world_size) == (4, 1)


def test_decode_context_parallelism_makes_shards_of_latent_attention():
    """Then each rank has other tokens of a block."""
    import torch
    from vllm.v1.core.kv_cache_utils import kv_cache_groups_tp_replicas
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, max_tp_shards=1
    )
    config = cache_config(spec)
    config.kv_tp_replicas = kv_cache_groups_tp_replicas(config.kv_cache_groups, 4, 4)
    parallel = {"world_size": 4, "tensor_parallel_size": 4, "decode_context_parallel_size": 4}
    layout = read_layout(engine_config(**parallel), config)
    assert layout.kv_layout(4 * BLOCK).world_size == 4
    assert layout.alignment == 4 * BLOCK


def test_stages_of_a_pipeline_are_ranks():
    """Five layers: three in the first stage, two in the second. To the server both shards have three."""
    stages = {"world_size": 2, "pipeline_parallel_size": 2}
    layers = {"get_total_num_hidden_layers": lambda: 5}
    first = several(a=attention(), b=attention(), c=attention())
    second = several(d=attention(), e=attention())
    configs = [engine_config(model=layers, rank=rank, **stages) for rank in (0, 1)]
    caches = [cache_config(first), cache_config(second)]
    layouts = [read_layout(config, cache) for config, cache in zip(configs, caches, strict=True)]
    assert [layout.groups[0].layer_names for layout in layouts] == [("a", "b", "c"), ("d", "e", "e")]
    assert layouts[0].kv_layout(64) == layouts[1].kv_layout(64)
    assert layouts[0].kv_layout(64).world_size == 2
    spaces = [namespace(config, cache) for config, cache in zip(configs, caches, strict=True)]
    assert spaces[0] == spaces[1]
    assert spaces[0] != namespace(cache=caches[0])


def test_scratch_groups_are_left_out():
    layout = read_layout(engine_config(), cache_config(attention("CircularBufferSpec"), attention()))
    (group,) = layout.groups
    assert (group.engine_index, layout.num_engine_groups) == (1, 2)


def test_blocks_first():
    assert read_layout(engine_config(), cache_config(attention(), layout="BLHNC")).block_major


@pytest.mark.parametrize(
    ("specs", "config", "text"),
    [
        (lambda: [recurrent("none"), attention()], {}, "--enable-prefix-caching"),
        (lambda: [attention(non_causal=True)], {}, "more than the tokens before it"),
        (lambda: [attention("RSWASpec", rswa_window=64)], {}, "more than the tokens before it"),
        (lambda: [attention("CrossAttentionSpec")], {}, "cross_attention"),
        (lambda: [attention("EncoderOnlyAttentionSpec")], {}, "encoder_only"),
        (lambda: [attention("CircularBufferSpec")], {}, "none of its KV cache groups"),
        (lambda: [attention(), attention()], {"pipeline_parallel_size": 2}, "pipeline"),
        (lambda: [attention()], {"pipeline_parallel_size": 3}, "pipeline"),
        (lambda: [attention(), several()], {"pipeline_parallel_size": 2}, "no layer"),
        (lambda: [attention()], {"prefill_context_parallel_size": 2}, "prefill context"),
        (lambda: [attention()], {"model": {"is_encoder_decoder": True}}, "encoder-decoder"),
        (
            lambda: [attention()],
            {"model": {"use_mla": True}, "scheduler": {"enable_chunked_prefill": False}},
            "latent attention",
        ),
    ],
)
def test_what_cannot_be_cached_is_refused(specs, config, text):
    with pytest.raises(LayoutUnsupported, match=text):
        read_layout(engine_config(**config), cache_config(*specs()))


def test_a_layout_that_scatters_blocks_is_refused():
    with pytest.raises(LayoutUnsupported, match="LHBNC"):
        read_layout(engine_config(), cache_config(attention(), layout="LHBNC"))


def namespace(config=None, cache=None, **settings):
    config, cache = config or engine_config(), cache or cache_config(attention())
    settings = ConnectorConfig(address="x", **settings)
    return engine_namespace(settings, config, cache, read_layout(config, cache))


def test_what_changes_the_bytes_changes_the_namespace():
    import torch

    spaces = {
        namespace(),
        namespace(cache=cache_config(attention(), layout="LBNHC")),
        namespace(cache=cache_config(attention(block_size=32))),
        namespace(cache=cache_config(attention(num_kv_heads=4))),
        namespace(engine_config(world_size=2, tensor_parallel_size=2)),
        namespace(engine_config(model={"dtype": "torch.float16"})),
        namespace(engine_config(model={"quantization": "fp8"})),
        namespace(engine_config(model={"revision": "v2"})),
        namespace(model="other"),
        namespace(cache=cache_config(recurrent(), attention())),
        namespace(cache=cache_config(recurrent(dtypes=(torch.float16, torch.float32)), attention())),
        namespace(engine_config(kv_dtype="fp8_e4m3")),
        namespace(engine_config(kv_dtype="fp8_e5m2")),
    }
    assert len(spaces) == 13
    assert namespace() in spaces
    assert namespace().kv_dtype == "bfloat16"


def test_the_instruction_set_is_part_of_the_namespace(monkeypatch):
    """On a CPU the inside of a block is packed for it."""
    import torch

    here = namespace()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ANOTHER")
    assert namespace() != here


def test_a_path_that_is_too_long_for_a_name_is_a_name_all_the_same():
    long, longer = (namespace(engine_config(model={"model": "/m" * n})) for n in (400, 401))
    assert long != longer
    long.validate()
