from __future__ import annotations

from dataclasses import replace

import pytest

from kvwire.errors import LayoutUnsupported
from kvwire.server.layout import KvGroup, KvLayout, ShardMap, layout_digest

FULL = KvGroup("full", 16, 0, 4, 1024, 16)
WINDOW = KvGroup("window", 16, 512, 2, 512, 16)
STATE = KvGroup("recurrent", 256, 0, 3, 4096, 1)


@pytest.mark.parametrize(
    ("window", "chunk_size", "chunks"),
    [(1, 256, 1), (2, 256, 1), (257, 256, 1), (258, 256, 2), (512, 256, 2), (513, 256, 2), (514, 256, 3)],
)
def test_a_window_needs_the_chunks_of_its_last_tokens_but_one(
    window: int, chunk_size: int, chunks: int
) -> None:
    assert replace(WINDOW, window_tokens=window).chunks_needed(chunk_size) == chunks


def test_other_kinds_need_everything_or_the_boundary() -> None:
    assert FULL.chunks_needed(256) is None
    assert STATE.chunks_needed(256) == 1


def test_masks_of_two_ranks_and_three_groups() -> None:
    shards = ShardMap(KvLayout(2, (FULL, WINDOW, STATE)), 256)
    assert shards.num_shards == 6
    assert shards.full_mask == 0b001001
    assert shards.windows == ((1, 0b100100), (2, 0b010010))
    assert shards.complete_mask == shards.full_mask
    assert shards.object_bytes == (16384, 8192, 4096)
    assert ShardMap(KvLayout(1, (WINDOW, STATE)), 256).complete_mask == 0b11


def test_equal_layouts_are_the_same_only_at_one_chunk_size() -> None:
    shards = ShardMap(KvLayout(1, (WINDOW,)), 256)
    assert shards.same_as(ShardMap(KvLayout(1, (replace(WINDOW),)), 256))
    assert not shards.same_as(ShardMap(KvLayout(2, (WINDOW,)), 256))
    assert not shards.same_as(ShardMap(KvLayout(1, (WINDOW,)), 512))


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (KvLayout(0, (FULL,)), "world_size 0"),
        (KvLayout(1025, (FULL,)), "world_size 1025"),
        (KvLayout(1, ()), "0 KV groups"),
        (KvLayout(1, (FULL,) * 65), "65 KV groups"),
        (KvLayout(1024, (FULL,) * 5), "5120 shards"),
        (KvLayout(1, (FULL, replace(FULL, span_tokens=96))), "group 1: chunk size 256 is not a multiple"),
        (KvLayout(1, (replace(FULL, span_tokens=0),)), "span_tokens 0"),
        (KvLayout(1, (replace(FULL, num_layers=0),)), "num_layers"),
        (KvLayout(1, (replace(FULL, block_bytes=0),)), "block_bytes"),
        (KvLayout(1, (replace(FULL, window_tokens=5),)), "window_tokens 5"),
        (KvLayout(1, (replace(WINDOW, window_tokens=0),)), "window_tokens 0"),
        (KvLayout(1, (replace(STATE, window_tokens=-1),)), "window_tokens -1"),
        (KvLayout(1, (replace(FULL, kind="linear"),)), "'linear' is unknown"),
        (KvLayout(1, (replace(WINDOW, blocks_per_object=17),)), "blocks_per_object 17"),
        (KvLayout(1, (replace(WINDOW, blocks_per_object=0),)), "blocks_per_object 0"),
        (KvLayout(1, (replace(FULL, blocks_per_object=8),)), "needs all 16 blocks"),
    ],
)
def test_what_cannot_be_cached_is_refused_with_the_reason(layout: KvLayout, why: str) -> None:
    with pytest.raises(LayoutUnsupported, match=why):
        ShardMap(layout, 256)


def test_a_layout_digest_tells_layouts_and_chunk_sizes_apart() -> None:
    layout = KvLayout(2, (FULL, WINDOW, STATE))
    others = [
        layout_digest(layout, 512),
        layout_digest(KvLayout(1, layout.groups), 256),
        layout_digest(KvLayout(2, (FULL, WINDOW)), 256),
        layout_digest(KvLayout(2, (FULL, STATE, WINDOW)), 256),
        layout_digest(KvLayout(2, (replace(FULL, num_layers=5), WINDOW, STATE)), 256),
        layout_digest(KvLayout(2, (FULL, replace(WINDOW, window_tokens=513), STATE)), 256),
    ]
    assert len({layout_digest(layout, 256), *others}) == len(others) + 1
    assert layout_digest(KvLayout(2, (FULL, WINDOW, replace(STATE))), 256) == layout_digest(layout, 256)


def test_a_layout_digest_is_the_same_everywhere() -> None:
    digest = layout_digest(KvLayout(2, (FULL, WINDOW, STATE)), 256)
    assert digest.hex() == "70b405aefce86861960bb0723ef9aa9694e793f088bac258dc17d3368ca7ac25"
