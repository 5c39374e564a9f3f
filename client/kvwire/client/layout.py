"""How an engine's KV is cut into groups, shards and objects, as a registration says it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import lcm
from typing import Final

from kvwire.errors import LayoutUnsupported
from kvwire.v1 import layout_pb2 as pb

_COARSE: Final = 4
"""An alignment of so many of the largest blocks is worth a word."""


class GroupKind(IntEnum):
    """What a KV group needs for resuming at a token boundary."""

    FULL_ATTENTION = pb.KV_GROUP_KIND_FULL_ATTENTION
    SLIDING_WINDOW = pb.KV_GROUP_KIND_SLIDING_WINDOW
    RECURRENT = pb.KV_GROUP_KIND_RECURRENT


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a block table. `block_bytes` counts one block over all of them, on one rank."""

    kind: GroupKind
    span_tokens: int
    num_layers: int
    block_bytes: int
    blocks_per_object: int
    window_tokens: int = 0

    @property
    def object_bytes(self) -> int:
        return self.block_bytes * self.blocks_per_object

    @property
    def page_bytes(self) -> int:
        """One layer of one block."""
        return self.block_bytes // self.num_layers


@dataclass(frozen=True, slots=True)
class KvLayout:
    """All shards of a chunk. Groups are named by their index."""

    groups: tuple[KvGroup, ...]
    world_size: int = 1

    def validate(self, chunk_size: int) -> None:
        """Raise LayoutUnsupported for what a server would refuse, naming the group."""
        if not self.groups:
            raise LayoutUnsupported("The layout has no cacheable KV group.", problem="no groups")
        for index, group in enumerate(self.groups):
            problem = _problem(group, chunk_size)
            if problem:
                raise LayoutUnsupported(f"KV group {index}: {problem}.", group=index, problem=problem)

    @property
    def alignment(self) -> int:
        """What every chunk boundary is a multiple of, in tokens."""
        return lcm(*(group.span_tokens for group in self.groups))

    def coarseness(self) -> str:
        """A warning where the block sizes of the groups fit together badly, or an empty string."""
        largest = max(group.span_tokens for group in self.groups)
        if self.alignment <= _COARSE * largest:
            return ""
        spans = sorted({group.span_tokens for group in self.groups})
        return (
            f"blocks of {spans} tokens have only multiples of {self.alignment} tokens in common, so prompts "
            "are cached in chunks that large: block sizes that share factors make smaller ones"
        )

    def to_message(self) -> pb.KvLayout:
        return pb.KvLayout(
            world_size=self.world_size,
            groups=[
                pb.KvGroup(
                    kind=pb.KvGroupKind.ValueType(group.kind),
                    span_tokens=group.span_tokens,
                    window_tokens=group.window_tokens,
                    num_layers=group.num_layers,
                    block_bytes=group.block_bytes,
                    blocks_per_object=group.blocks_per_object,
                )
                for group in self.groups
            ],
        )


def blocks_per_object(kind: GroupKind, chunk_size: int, span_tokens: int, window_tokens: int = 0) -> int:
    """How many of a chunk's blocks an object holds: its last ones, as many as resuming at its end needs.

    Raises LayoutUnsupported when the chunk size is no multiple of the span.
    """
    if span_tokens < 1 or chunk_size % span_tokens:
        raise LayoutUnsupported(
            f"A chunk of {chunk_size} tokens is not a whole number of blocks of {span_tokens} tokens.",
            problem="chunk size",
        )
    blocks = chunk_size // span_tokens
    if kind is GroupKind.FULL_ATTENTION:
        return blocks
    if kind is GroupKind.RECURRENT:
        return 1
    return min(blocks, max(1, -(-(window_tokens - 1) // span_tokens)))


def _problem(group: KvGroup, chunk_size: int) -> str:
    if group.span_tokens < 1 or chunk_size % group.span_tokens:
        return f"the chunk size {chunk_size} is no multiple of its span of {group.span_tokens} tokens"
    if group.num_layers < 1 or group.block_bytes < 1 or group.block_bytes % group.num_layers:
        return f"{group.block_bytes} bytes are no block of {group.num_layers} equal layers"
    if not 1 <= group.blocks_per_object <= chunk_size // group.span_tokens:
        return f"an object cannot hold {group.blocks_per_object} of the blocks of a chunk"
    if (group.window_tokens > 0) != (group.kind is GroupKind.SLIDING_WINDOW):
        return f"a window of {group.window_tokens} tokens does not fit its kind {group.kind.name}"
    return ""
