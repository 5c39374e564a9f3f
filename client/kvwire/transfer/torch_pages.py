"""Pages out of torch tensors: where they lie, without a copy and without looking at their type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvwire.errors import LayoutUnsupported, MissingExtra
from kvwire.transfer.geometry import LayerPages
from kvwire.transfer.host import HostMover

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvwire.transfer.pages import Mover


def import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingExtra("KV in torch tensors", "torch") from error
    return torch


def mover_for(kv_caches: Mapping[str, Any]) -> Mover:
    """The mover for the device that all tensors are on. Raises LayoutUnsupported."""
    devices = {tensor.device for tensor in kv_caches.values()}
    if len(devices) != 1:
        raise LayoutUnsupported(
            f"The KV tensors of a worker lie on {len(devices)} devices, not on one.", problem="devices"
        )
    device = devices.pop()
    if device.type == "cpu":
        return HostMover()
    if device.type == "cuda":
        from kvwire.transfer.cuda import CudaMover

        return CudaMover(device)
    raise LayoutUnsupported(f"KV on a device of type {device.type} cannot be moved.", problem="device type")


class Memories:
    """The allocations of an engine, each once, so that layers which share one are seen to share it."""

    def __init__(self) -> None:
        self._torch = import_torch()
        self._known: dict[int, Any] = {}

    def layer(self, tensor: Any, num_blocks: int) -> LayerPages:
        """The pages of one layer. Raises LayoutUnsupported when its first dimension does not count blocks."""
        if tensor.dim() < 2 or tensor.shape[0] % num_blocks or not tensor.numel():
            raise LayoutUnsupported(
                f"A KV tensor of shape {tuple(tensor.shape)} has not {num_blocks} blocks in dimension 0.",
                problem="shape",
            )
        grouped = tensor.unflatten(0, (num_blocks, -1))
        size = tensor.element_size()
        dims = [(count, stride * size) for count, stride in zip(grouped.shape, grouped.stride(), strict=True)]
        row_bytes, parts = _rows(dims[1:], size)
        return LayerPages(
            memory=self._memory(tensor),
            offset=tensor.storage_offset() * size,
            block_stride=grouped.stride(0) * size,
            num_blocks=num_blocks,
            row_bytes=row_bytes,
            parts=parts,
        )

    def _memory(self, tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._known:
            # The portable byte view: it also works for views that are padded or packed with other layers.
            flat = self._torch.empty(0, dtype=self._torch.uint8, device=tensor.device)
            flat = flat.set_(storage, 0, (storage.nbytes(),), (1,))
            self._known[address] = flat.numpy() if tensor.device.type == "cpu" else flat
        return self._known[address]


def _rows(dims: list[tuple[int, int]], element: int) -> tuple[int, tuple[int, ...]]:
    """Length of the dense rows of a page, and where each begins. Dimensions merge from the innermost on."""
    row = element
    outer: list[tuple[int, int]] = []
    for count, stride in sorted((each for each in dims if each[0] > 1), key=lambda each: each[1]):
        if not outer and stride == row:
            row *= count
        else:
            outer.insert(0, (count, stride))
    parts = [0]
    for count, stride in outer:
        parts = [start + i * stride for start in parts for i in range(count)]
    return row, tuple(parts)
