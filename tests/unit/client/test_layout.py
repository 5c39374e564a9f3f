from __future__ import annotations

import pytest

from kvwire.client.fingerprint import cpu_isa, digest_of, isa_of, layout_fingerprint
from kvwire.client.layout import GroupKind, KvGroup, KvLayout, blocks_per_object
from kvwire.errors import LayoutUnsupported

FULL, WINDOW, STATE = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.RECURRENT


@pytest.mark.parametrize(
    ("kind", "chunk_size", "span", "window", "wanted"),
    [
        (FULL, 256, 16, 0, 16),
        (WINDOW, 256, 16, 64, 4),
        (WINDOW, 256, 16, 65, 4),
        (WINDOW, 256, 16, 66, 5),
        (WINDOW, 256, 16, 1024, 16),
        (WINDOW, 256, 16, 1, 1),
        (STATE, 544, 544, 0, 1),
        (STATE, 1088, 544, 0, 1),
    ],
)
def test_an_object_holds_what_resuming_needs(kind, chunk_size, span, window, wanted):
    assert blocks_per_object(kind, chunk_size, span, window) == wanted


def test_a_chunk_that_is_not_made_of_blocks_is_refused():
    for span in (48, 0):
        with pytest.raises(LayoutUnsupported, match="whole number"):
            blocks_per_object(FULL, 256, span)


def group(**changes):
    values = {"kind": FULL, "span_tokens": 16, "num_layers": 2, "block_bytes": 64, "blocks_per_object": 4}
    return KvGroup(**{**values, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"span_tokens": 48},
        {"num_layers": 0},
        {"block_bytes": 63},
        {"blocks_per_object": 5},
        {"blocks_per_object": 0},
        {"window_tokens": 9},
        {"kind": WINDOW},
    ],
)
def test_layouts_that_a_server_would_refuse_are_refused_with_the_group(changes):
    with pytest.raises(LayoutUnsupported, match="KV group 1") as caught:
        KvLayout((group(), group(**changes))).validate(64)
    assert caught.value.metadata["group"] == "1"


def test_a_layout_needs_a_group():
    with pytest.raises(LayoutUnsupported, match="no cacheable"):
        KvLayout(()).validate(64)
    KvLayout((group(), group(kind=WINDOW, window_tokens=9))).validate(64)


def test_a_message_says_everything():
    message = KvLayout((group(kind=WINDOW, window_tokens=9),), world_size=2).to_message()
    told = message.groups[0]
    assert (message.world_size, told.kind, told.window_tokens, told.block_bytes) == (2, WINDOW, 9, 64)
    assert (told.span_tokens, told.num_layers, told.blocks_per_object) == (16, 2, 4)


def test_block_sizes_that_fit_badly_are_worth_a_word():
    assert KvLayout((group(), group(span_tokens=32))).coarseness() == ""
    assert "1632" in KvLayout((group(span_tokens=32), group(span_tokens=51))).coarseness()


FACTS = {
    "dtype": "bfloat16",
    "block_sizes": [16],
    "page_bytes": [[64, 64]],
    "order": "layers",
    "device": "cpu",
}


def test_whatever_changes_bytes_changes_the_fingerprint():
    base = layout_fingerprint(**FACTS)
    assert len(base) == 32
    assert base == layout_fingerprint(**FACTS)
    others = [
        {"dtype": "float16"},
        {"block_sizes": [32]},
        {"page_bytes": [[64], [64]]},
        {"order": "blocks"},
        {"device": "cuda"},
        {"facts": {"layers": ["a", "b"]}},
    ]
    assert len({base, *(layout_fingerprint(**{**FACTS, **other}) for other in others)}) == 7


def test_the_instruction_set_counts_on_a_cpu_and_nowhere_else(monkeypatch):
    one, gpu = layout_fingerprint(**FACTS), layout_fingerprint(**{**FACTS, "device": "cuda"})
    monkeypatch.setattr("kvwire.client.fingerprint.cpu_isa", lambda: ("amx_tile",))
    assert layout_fingerprint(**FACTS) != one
    assert layout_fingerprint(**{**FACTS, "device": "cuda"}) == gpu


def test_the_instruction_set_is_read_from_cpuinfo():
    x86 = "processor : 0\nflags\t\t: fpu sse avx2 avx512f amx_tile amx_bf16 avx512_bf16\n"
    assert isa_of(x86) == ("amx_tile", "amx_bf16", "avx512f", "avx512_bf16", "avx2")
    assert isa_of("Features\t: fp asimd sve bf16\n") == ("asimd", "bf16", "sve")
    assert isa_of("") == ()
    assert cpu_isa() == cpu_isa()


def test_facts_are_told_in_any_order():
    assert digest_of({"a": 1, "b": [2]}) == digest_of({"b": [2], "a": 1}) != digest_of({"a": 1, "b": [3]})
