from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.errors import InvalidArgument, LayoutUnsupported, RangeInvalid, TransferFailed
from kvwire.transfer.base import Slot
from kvwire.transfer.pages import PageMover, pages_from_arrays, pages_from_torch

pytestmark = pytest.mark.leakcheck("threads")


def random_bytes(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def separate(layers, blocks, page):
    return [random_bytes((blocks, page), seed) for seed in range(layers)]


def one_allocation(layers, blocks, page):
    return list(random_bytes((layers, blocks, page)))


def block_outermost(layers, blocks, page):
    whole = random_bytes((blocks, layers, page))
    return [whole[:, layer] for layer in range(layers)]


def padded(layers, blocks, page):
    return [each[:, 3 : 3 + page] for each in random_bytes((layers, blocks, page + 5))]


def unequal(layers, blocks, page):
    return [random_bytes((blocks, page + 8 * layer), layer) for layer in range(layers)]


LAYOUTS = [separate, one_allocation, block_outermost, padded, unequal]


def reference(layers, ids, order):
    if order == "layers":
        return np.concatenate([layer[i] for layer in layers for i in ids])
    return np.concatenate([layer[i] for i in ids for layer in layers])


@pytest.mark.parametrize("order", ["layers", "blocks"])
@pytest.mark.parametrize("make", LAYOUTS)
@settings(max_examples=30)
@given(data=st.data())
def test_any_range_of_an_object_both_ways(make, order, data):
    num_layers = data.draw(st.integers(1, 4))
    blocks = data.draw(st.integers(1, 6))
    page = data.draw(st.sampled_from([1, 7, 16, 24]))
    layers = make(num_layers, blocks, page)
    ids = data.draw(st.permutations(range(blocks)))[: data.draw(st.integers(1, blocks))]
    pages = pages_from_arrays(layers, order)
    whole = reference(layers, ids, order)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert pages.block_bytes * len(ids) == len(whole)

    out = np.zeros(stop - start, dtype=np.uint8)
    pages.gather_into(ids, out, start, stop)
    assert (out == whole[start:stop]).all()

    skipped = set(data.draw(st.sets(st.sampled_from(ids))))
    before = [layer.copy() for layer in layers]
    expected = whole.copy()
    expected[start:stop] ^= 0x5A
    pages.scatter_from([None if i in skipped else i for i in ids], expected[start:stop], start, stop)
    kept = [i for i in ids if i not in skipped]
    for layer, old in zip(layers, before, strict=True):
        untouched = [i for i in range(blocks) if i not in kept]
        assert (layer[untouched] == old[untouched]).all()
    after = reference(layers, ids, order)
    mask = np.concatenate(
        [np.full(layer.shape[1], i in kept) for layer in layers for i in ids]
        if order == "layers"
        else [np.full(layer.shape[1], i in kept) for i in ids for layer in layers]
    )
    mask[:start] = mask[stop:] = False
    assert (after == np.where(mask, expected, whole)).all()


def test_neighbours_of_padded_pages_are_not_touched():
    whole = np.zeros((2, 4, 32), dtype=np.uint8)
    pages = pages_from_arrays([layer[:, 8:24] for layer in whole])
    pages.scatter_from([3, 1], np.full(2 * 2 * 16, 9, dtype=np.uint8))
    assert whole[:, [1, 3], 8:24].min() == 9
    assert whole[:, :, :8].max() == whole[:, :, 24:].max() == whole[:, [0, 2]].max() == 0


@pytest.mark.parametrize("order", ["layers", "blocks"])
@pytest.mark.parametrize("row_bytes", [65536, 3 * 9216, 16400])
@pytest.mark.parametrize("allocations", [1, 4])
def test_several_threads_move_the_same_bytes(order, row_bytes, allocations):
    layers = list(random_bytes((4, 64, row_bytes)))
    if allocations > 1:
        layers = [layer.copy() for layer in layers]
    ids = np.random.default_rng(1).permutation(64)[:48]
    before = [layer.copy() for layer in layers]
    pages = pages_from_arrays(layers, order, threads=3)
    out = np.zeros(pages.block_bytes * 48, dtype=np.uint8)
    pages.gather_into(ids, out)
    assert (out == reference(layers, ids, order)).all()
    pages.scatter_from(pages.index(ids), out ^ 1)
    assert (out ^ 1 == reference(layers, ids, order)).all()
    start = 3 * row_bytes
    pages.scatter_from(ids, out[start:], start)
    expected = out ^ 1
    expected[start:] ^= 1
    assert (expected == reference(layers, ids, order)).all()
    untouched = np.setdiff1d(np.arange(64), ids)
    assert all((layer[untouched] == old[untouched]).all() for layer, old in zip(layers, before, strict=True))


def test_bl23_blocks_that_the_engine_holds_keep_their_bytes():
    layers = [np.full((8, 64), 0xEE, dtype=np.uint8) for _ in range(2)]
    pages = pages_from_arrays(layers)
    data = random_bytes(pages.block_bytes * 4)
    pages.scatter_from([None, None, -1, 5], data)
    assert (layers[0][5] == data[3 * 64 : 4 * 64]).all()
    assert (layers[1][5] == data[7 * 64 :]).all()
    for layer in layers:
        assert (np.delete(layer, 5, axis=0) == 0xEE).all()


def test_what_is_refused():
    pages = pages_from_arrays(separate(2, 4, 16))
    out = np.zeros(pages.block_bytes, dtype=np.uint8)
    for ids in ([4], [-2], [1 << 40]):
        with pytest.raises(RangeInvalid):
            pages.index(ids)
    with pytest.raises(InvalidArgument):
        pages.index([])
    with pytest.raises(InvalidArgument):
        pages.gather_into([None], out)
    with pytest.raises(InvalidArgument):
        pages.gather_into([1], out[:-1])
    with pytest.raises(InvalidArgument):
        pages.gather_into([1], out, 8, 8 + len(out))
    with pytest.raises(InvalidArgument):
        pages_from_arrays(separate(1, 1, 1), threads=-1)
    for layers in (
        [],
        [random_bytes((4, 16)), random_bytes((5, 16))],
        [random_bytes((4, 16)).astype(np.int16)],
        [random_bytes((4, 32))[:, ::2]],
        [random_bytes((16, 4)).T],
    ):
        with pytest.raises(LayoutUnsupported):
            pages_from_arrays(layers)


def test_mover_looks_objects_up_by_chunk_and_group():
    groups = [pages_from_arrays(separate(2, 8, 16)), pages_from_arrays(separate(3, 8, 8))]
    mover = PageMover(groups, {(0, 0): [1, 2], (0, 1): [3], (5, 1): [None]})
    slot = Slot(0, 0, 1, 24)
    out = np.zeros(16, dtype=np.uint8)
    mover.fill(slot, 8, 24, out)
    expected = np.zeros(24, dtype=np.uint8)
    groups[1].gather_into([3], expected)
    assert (out == expected[8:]).all()
    mover.drain(Slot(1, 5, 1, 24), 0, 24, expected)
    with pytest.raises(TransferFailed):
        mover.fill(Slot(0, 0, 0, 48), 0, 48, np.zeros(48, dtype=np.uint8))


torch = pytest.importorskip("torch")


def tensors_of(layout, layers=3, blocks=6, heads=2, tokens=4, content=8):
    """An engine's views of one allocation, each [B, H, N, C], by the order of the dimensions in memory."""
    sizes = {"L": layers, "B": blocks, "H": heads, "N": tokens, "C": content}
    whole = torch.arange(layers * blocks * heads * tokens * content, dtype=torch.int32)
    whole = whole.view([sizes[letter] for letter in layout])
    whole = whole.permute([layout.index(letter) for letter in "LBHNC"])
    return {f"layer.{i}": whole[i] for i in range(layers)}


def page_of(tensor, block):
    """The bytes of a block in the order of memory."""
    part = tensor[block]
    order = sorted(range(part.dim()), key=lambda dim: -part.stride(dim))
    return part.permute(order).contiguous().view(torch.uint8).numpy().reshape(-1)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "LHBNC", "BHLNC"])
def test_every_layout_of_the_engine(layout):
    caches = tensors_of(layout)
    names = list(caches)
    one, two = pages_from_torch(caches, [names[:2], names[2:]], 6)
    ids = [5, 0, 3]
    out = np.zeros(one.block_bytes * 3, dtype=np.uint8)
    one.gather_into(ids, out)
    expected = np.concatenate([page_of(caches[name], i) for name in names[:2] for i in ids])
    assert (out == expected).all()
    one.scatter_from([1, 2, 4], out)
    assert (caches[names[1]][4] == caches[names[1]][3]).all()
    assert two.block_bytes * 2 == one.block_bytes


def test_blocks_order_of_block_outermost_storage():
    caches = tensors_of("BLHNC")
    (pages,) = pages_from_torch(caches, [list(caches)], 6, order="blocks")
    out = np.zeros(pages.block_bytes * 2, dtype=np.uint8)
    pages.gather_into([4, 1], out)
    assert (out == np.concatenate([page_of(caches[n], i) for i in (4, 1) for n in caches])).all()


def test_kernel_blocks_make_up_the_engine_s_blocks():
    cache = torch.arange(8 * 2 * 4, dtype=torch.bfloat16).view(8, 2, 4)
    (pages,) = pages_from_torch({"a": cache}, [["a"]], 4)
    out = np.zeros(pages.block_bytes, dtype=np.uint8)
    pages.gather_into([3], out)
    assert (out == cache[6:8].view(torch.uint8).numpy().reshape(-1)).all()


def test_groups_that_alias_the_same_memory():
    whole = torch.zeros(2, 4, 16, dtype=torch.uint8)
    caches = {"a": whole[0], "b": whole[0], "c": whole[1]}
    full, window = pages_from_torch(caches, [["a"], ["b", "c"]], 4)
    full.scatter_from([1], np.full(16, 1, dtype=np.uint8))
    window.scatter_from([2], np.full(32, 2, dtype=np.uint8))
    assert whole.view(2, 4, 16)[0, 1].unique().tolist() == [1]
    assert whole[:, 2].unique().tolist() == [2]


def test_tensors_that_cannot_be_paged():
    with pytest.raises(LayoutUnsupported):
        pages_from_torch({"a": torch.zeros(7, 4)}, [["a"]], 4)
    with pytest.raises(LayoutUnsupported):
        pages_from_torch({"a": torch.zeros(4, 4, device="meta")}, [["a"]], 4)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["layers", "blocks"])
@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_cuda_pages(layout, order):
    from kvwire.transfer import cuda, memory

    caches = {
        name: tensor.cuda() for name, tensor in tensors_of(layout, blocks=64, tokens=64, content=64).items()
    }
    whole = tensors_of(layout, blocks=64, tokens=64, content=64)
    (pages,) = pages_from_torch(caches, [list(caches)], 64, order=order)
    (host,) = pages_from_torch(whole, [list(whole)], 64, order=order)
    ids = [9, 63, 0, 17]
    out = memory.anonymous(pages.block_bytes * 4)
    assert cuda.register_host(out)
    pages.fence()
    pages.gather_into(ids, out)
    expected = np.zeros_like(out)
    host.gather_into(ids, expected)
    assert (out == expected).all()
    pages.scatter_from([1, None, 2, 3], out)
    host.scatter_from([1, None, 2, 3], expected)
    assert all((caches[name].cpu() == whole[name]).all() for name in whole)
    pages.gather_into(ids, out[5:99], 5, 99)
    assert (out[5:99] == expected[5:99]).all()
    cuda.unregister_host(out)
