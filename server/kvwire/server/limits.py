"""Limits on one call, checked before anything is converted: 16 MiB hold millions of tiny items."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvwire.serving.requests import check_count
from kvwire.v1 import cache_service_pb2 as cache

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvwire.server.config import ServerConfig

MAX_EXTRA_INPUTS: Final = 1024
MAX_EXTRA_DEPTH: Final = 16
"""Inputs that may cover one token. Those of a real prompt lie side by side: the depth is 1."""
MAX_OFFERED: Final = 64
"""Protocol versions, digest functions or data paths that a client may list."""

UNLIMITED: Final = frozenset(
    {
        "Ping",
        "Attach",
        "SubscribeKvEvents",
        "ReleaseLookup",
        "EndSession",
        "EndRetrieve",
        "AbortStore",
        "GetStatus",
        "ReleaseLease",
    }
)
"""Calls that are never refused for load: life signs, open streams, and calls that give something back."""
OPEN_WHILE_DRAINING: Final = frozenset({"CommitStore", "UnregisterKvCache", "WriteChunks", "ReadChunks"})

_Item: TypeAlias = cache.StoreItem | cache.RetrieveItem


def check_batch(field: str, items: Any, config: ServerConfig) -> None:
    check_count(field, len(items), config.max_items)


def check_slots(field: str, lists: Iterable[Any], config: ServerConfig) -> None:
    """`lists` name slots, item by item."""
    check_count(field, sum(len(slots) for slots in lists), config.max_slots)


def check_chunks(items: Iterable[_Item], groups: int, config: ServerConfig) -> None:
    """Refuse a call that names too many chunks, or could lease too many slots."""
    check_count("chunks", sum(item_count(item) for item in items), config.max_chunks)
    check_count("ranges", sum(len(item.ranges) for item in items), config.max_slots)
    slots = sum(
        sum(part.chunk_count for part in item.ranges) if item.ranges else item_count(item) * groups
        for item in items
    )
    check_count("slots", slots, config.max_slots)


def item_count(item: _Item) -> int:
    """How many chunks an item names."""
    if item.WhichOneof("target") == "keys":
        return len(item.keys.keys)
    return item.session.chunk_count


def check_extra_inputs(inputs: Any) -> None:
    """Inputs that pile up would each be hashed into every chunk below them."""
    check_count("extra_inputs", len(inputs), MAX_EXTRA_INPUTS)
    edges = [(extra.start, 1) for extra in inputs] + [(extra.start + extra.length, -1) for extra in inputs]
    depth = 0
    for _, step in sorted(edges):
        depth += step
        check_count("extra_inputs that cover one token", depth, MAX_EXTRA_DEPTH)
