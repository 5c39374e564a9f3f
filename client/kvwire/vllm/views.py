"""The engine's KV tensors as matrices of bytes: one row per block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvwire.errors import LayoutUnsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvwire.vllm.layout import CacheGroup, EngineLayout


def group_views(layout: EngineLayout, kv_caches: Mapping[str, Any]) -> list[list[Any]]:
    """For every cacheable group the uint8 matrices [num_blocks, row_bytes] that its objects are cut from.

    An object is the chosen rows of the first matrix, then those of the second, and so on: one per layer, or a
    single one where the engine keeps all layers of a block together. Rows are contiguous; the matrices
    share the engine's memory. Raises LayoutUnsupported for tensors that are not made of whole blocks.
    """
    return [_group_views(layout, group, kv_caches) for group in layout.groups]


def _group_views(layout: EngineLayout, group: CacheGroup, kv_caches: Mapping[str, Any]) -> list[Any]:
    views = [
        _layer_view(name, kv_caches[name], layout.num_blocks, page_bytes)
        for name, page_bytes in zip(group.layer_names, group.page_bytes, strict=True)
    ]
    if layout.block_major and _lie_together(views):
        first = views[0]
        return [_matrix(first, first.storage_offset(), layout.num_blocks, group.block_bytes, first.stride(0))]
    return views


def _layer_view(name: str, cache: Any, num_blocks: int, page_bytes: int) -> Any:
    tensor = cache[0] if isinstance(cache, (list, tuple)) else cache
    # A block may be split into several kernel blocks, which lie behind one another.
    parts, rest = divmod(tensor.shape[0], num_blocks)
    size = tensor.element_size()
    row_stride = tensor.stride(0) * size * parts
    if rest or parts < 1 or page_bytes > row_stride:
        raise LayoutUnsupported(
            f"Layer {name}: a tensor of shape {tuple(tensor.shape)} does not hold {num_blocks} blocks of "
            f"{page_bytes} bytes.",
            layer=name,
        )
    return _matrix(tensor, tensor.storage_offset() * size, num_blocks, page_bytes, row_stride)


def _matrix(tensor: Any, offset: int, rows: int, row_bytes: int, row_stride: int) -> Any:
    import torch

    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage(), offset, (rows, row_bytes), (row_stride, 1))


def _lie_together(views: list[Any]) -> bool:
    """Whether each layer's page follows the one before it in every block."""
    first = views[0]
    end = first.storage_offset()
    for view in views:
        if view.storage_offset() != end or view.stride(0) != first.stride(0):
            return False
        if view.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return False
        end += view.shape[1]
    return True
