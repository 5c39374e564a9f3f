from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvwire.errors import LayoutUnsupported  # noqa: E402
from kvwire.vllm.views import group_views  # noqa: E402
from support.fake_engine import group, layout  # noqa: E402

BLOCKS, HEADS, TOKENS, CONTENT = 6, 2, 4, 8
PAGE = HEADS * TOKENS * CONTENT * 4


def layer_outermost(layers):
    """[L, B, H, N, C], the layout of a CPU."""
    storage = torch.arange(layers * BLOCKS * HEADS * TOKENS * CONTENT, dtype=torch.float32)
    return storage.view(layers, BLOCKS, HEADS, TOKENS, CONTENT)


def block_outermost(layers):
    return layer_outermost(layers).view(BLOCKS, layers, HEADS, TOKENS, CONTENT).transpose(0, 1)


def caches(tensors, *groups):
    return {name: tensors[i] for each in groups for i, name in enumerate(each.layer_names)}


def test_one_matrix_per_layer():
    one = group(page=PAGE)
    tensors = layer_outermost(2)
    (views,) = group_views(layout(one, num_blocks=BLOCKS), caches(tensors, one))
    assert [tuple(view.shape) for view in views] == [(BLOCKS, PAGE)] * 2
    for view, tensor in zip(views, tensors, strict=True):
        assert bytes(view[3].numpy()) == bytes(tensor[3].numpy())
        view[3].zero_()
        assert not tensor[3].any()
        assert tensor[4].all()


def test_one_matrix_where_all_layers_of_a_block_lie_together():
    one = group(page=PAGE, layers=3)
    tensors = block_outermost(3)
    (views,) = group_views(layout(one, num_blocks=BLOCKS, block_major=True), caches(tensors, one))
    (view,) = views
    assert tuple(view.shape) == (BLOCKS, 3 * PAGE)
    assert bytes(view[2].numpy()) == b"".join(bytes(tensor[2].numpy()) for tensor in tensors)


def test_layers_that_do_not_follow_one_another_stay_apart():
    one = group(page=PAGE)
    tensors = block_outermost(3)
    picked = {one.layer_names[0]: tensors[0], one.layer_names[1]: tensors[2]}
    (views,) = group_views(layout(one, num_blocks=BLOCKS, block_major=True), picked)
    assert [tuple(view.shape) for view in views] == [(BLOCKS, PAGE)] * 2


def test_kernel_blocks_are_one_block():
    one = group(page=2 * PAGE, layers=1)
    tensors = layer_outermost(1)
    (views,) = group_views(layout(one, num_blocks=BLOCKS // 2), caches(tensors, one))
    assert bytes(views[0][1].numpy()) == bytes(tensors[0, 2:4].numpy())


def test_padding_behind_a_page_is_skipped():
    storage = torch.zeros(BLOCKS, PAGE // 4 + 16)
    tensor = storage[:, : PAGE // 4].unflatten(1, (HEADS, TOKENS, CONTENT))
    tensor[2] = 7
    one = group(page=PAGE, layers=1)
    (views,) = group_views(layout(one, num_blocks=BLOCKS), caches([tensor], one))
    assert bytes(views[0][2].numpy()) == bytes(tensor[2].contiguous().numpy())
    assert not views[0][1].any()


@pytest.mark.parametrize(("num_blocks", "page"), [(BLOCKS - 1, PAGE), (2 * BLOCKS, PAGE), (BLOCKS, PAGE + 1)])
def test_tensors_that_are_not_made_of_whole_blocks_are_refused(num_blocks, page):
    one = group(page=page)
    with pytest.raises(LayoutUnsupported, match="Layer group0"):
        group_views(layout(one, num_blocks=num_blocks), caches(layer_outermost(2), one))
