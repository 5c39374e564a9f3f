"""KV events in vLLM's own words: its block hashes and event types, and a medium that is kvwire's."""

from __future__ import annotations

import logging
from array import array
from typing import TYPE_CHECKING, Any, Final

from kvwire.vllm.adapters_common import hash_keys
from kvwire.vllm.events import Chunk, EventBook, EventReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.client.client import Client
    from kvwire.keys import Namespace
    from kvwire.vllm.servers import Share
    from kvwire.vllm.tracker import RequestTracker

logger = logging.getLogger(__name__)

MEDIUM: Final = "KVWIRE"


class Announcer:
    """Names the chunks of this engine's requests, and tells which of them the servers hold."""

    def __init__(self, shares: Sequence[Share], hash_block_size: int) -> None:
        self.book = EventBook(len(shares))
        self._shares = tuple(shares)
        self._block_size = hash_block_size
        self._readers: list[EventReader] = []

    def follow(self, clients: Sequence[tuple[Client, Namespace]], on_loss: Callable[[], None]) -> None:
        for server, (client, namespace) in enumerate(clients):
            self._readers.append(EventReader(client, namespace, self.book, server, on_loss))
            self._readers[-1].start()

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def named(self, tracker: RequestTracker, chunks: range, chunk_size: int) -> None:
        """These chunks of a request are, or will soon be, at the servers.

        Those of a request with a salt are not told: an event would have to carry the salt.
        """
        if tracker.namespace.salt or chunk_size % self._block_size:
            return
        try:
            self._name(tracker, chunks, chunk_size)
        except Exception:
            logger.exception("kvwire: no KV events for request %s", tracker.request_id)

    def _name(self, tracker: RequestTracker, chunks: range, chunk_size: int) -> None:
        blocks = chunk_size // self._block_size
        own = tracker.keys(range(chunks.stop), chunk_size)
        at = [self._keys_at(share, tracker.namespace, chunk_size, own) for share in self._shares]
        for chunk in chunks:
            keys = tuple(each[chunk] for each in at)
            if self.book.knows(keys):
                continue
            made = self._chunk(tracker.request, chunk * blocks, blocks)
            if made is None:
                return
            self.book.name(keys, made)

    def _keys_at(
        self, share: Share, namespace: Namespace, chunk_size: int, own: Sequence[bytes]
    ) -> Sequence[bytes]:
        if share.is_whole:
            return own
        return hash_keys(share.namespace(namespace), chunk_size, own, 1)

    def _chunk(self, request: Any, first: int, count: int) -> Chunk | None:
        """None: the engine has not hashed all of it yet."""
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        hashes = request.block_hashes[first : first + count]
        if len(hashes) < count:
            return None
        size = self._block_size
        return Chunk(
            hashes=tuple(maybe_convert_block_hash(each) for each in hashes),
            parent=maybe_convert_block_hash(request.block_hashes[first - 1]) if first else None,
            tokens=array("I", request.all_token_ids[first * size : (first + count) * size]),
            block_size=size,
            details=_details(request, first, count, size),
        )


def vllm_events(book: EventBook) -> list[Any]:
    """What has changed since the last call."""
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    return [
        BlockStored(
            block_hashes=list(each.hashes),
            parent_block_hash=each.parent,
            token_ids=each.tokens.tolist(),
            block_size=each.block_size,
            medium=MEDIUM,
            **each.details,
        )
        if isinstance(each, Chunk)
        else BlockRemoved(block_hashes=list(each.hashes), medium=MEDIUM)
        for each in book.take()
    ]


def _details(request: Any, first: int, count: int, block_size: int) -> dict[str, Any]:
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys

    lora = request.lora_request
    found: dict[str, Any] = {
        "lora_id": lora.adapter_id if lora else None,
        "lora_name": lora.name if lora else None,
        "session_id": getattr(request, "session_id", None),
    }
    if lora or request.mm_features:
        extras, at = [], 0
        for block in range(first, first + count):
            start = block * block_size
            keys, at = generate_block_hash_extra_keys(request, start, start + block_size, at)
            extras.append(keys)
        found["extra_keys"] = to_event_extra_keys(extras)
    return found
