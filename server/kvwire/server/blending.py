"""This server's own matcher of chunks at any position, and the fleet's matches beside its own.

A match is no permission to reuse: position-dependent KV is validated by whoever reuses it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from kvwire.blend import BlendChunk, BlendIndex
from kvwire.errors import NotImplementedYet, TokensInvalid
from kvwire.keys import DIGEST_SIZE, TOKEN_BYTES, root
from kvwire.server.peer import MEMORY
from kvwire.v1 import cache_service_pb2 as cache
from kvwire.v1 import coordinator_service_pb2, event_pb2, placement_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvwire.keys import Namespace
    from kvwire.server.store import Chunk, L1Store, RemovedChunk, StoredChunk

log = logging.getLogger("kvwire.server")

Found = tuple[int, int, bytes]
"""Position in the prompt, position where it was computed, key: what makes two matches the same one."""


class LocalMatcher:
    """The blend index over what is complete in memory, as a listener of the store."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.index: BlendIndex | None = None

    def bind_chunk_size(self, chunk_size: int) -> None:
        if self.index is None or self.index.chunk_size != chunk_size:
            self.index = BlendIndex(chunk_size, self._max_bytes)

    def tokens_of(self, key: bytes) -> bytes:
        return self.index.tokens_of(key) if self.index is not None else b""

    def on_stored(self, event: StoredChunk) -> None:
        if self.index is not None and event.tokens:
            self.index.add([BlendChunk(event.key, event.root, event.parent_key, event.tokens)])

    def on_removed(self, event: RemovedChunk) -> None:
        if self.index is not None:
            self.index.remove(event.key)

    def on_cleared(self) -> None:
        if self.index is not None:
            self.index.clear()

    def on_used(self, chunks: Sequence[Chunk]) -> None: ...


class Blending:
    """Answers MatchBlend. `ask` lists stubs of coordinators that this server is a member of."""

    def __init__(self, matcher: LocalMatcher, store: L1Store, server_id: str, incarnation: bytes) -> None:
        self._matcher = matcher
        self._store = store
        self._server_id = server_id
        self._incarnation = incarnation

    def local(
        self, namespace: Namespace, tokens: bytes, chunk_size: int
    ) -> dict[Found, placement_pb2.BlendMatch]:
        """Raises TokensInvalid, InvalidArgument."""
        if len(tokens) % TOKEN_BYTES:
            raise TokensInvalid(f"tokens: {len(tokens)} bytes are no packed uint32.")
        chunk_root = root(namespace, chunk_size)
        index = self._matcher.index
        hits = index.match(chunk_root, tokens) if index is not None else []
        found: dict[Found, placement_pb2.BlendMatch] = {}
        for hit in hits:
            chunk = self._store.get(hit.key)
            if chunk is not None and chunk.announced:
                match = placement_pb2.BlendMatch(
                    chunk_key=hit.key,
                    cached_position=hit.cached_position,
                    prompt_position=hit.prompt_position,
                    placements=[self._placement(chunk)],
                )
                found[identity(match)] = match
        return found

    def _placement(self, chunk: Chunk) -> placement_pb2.Placement:
        return placement_pb2.Placement(
            server_id=self._server_id,
            incarnation=self._incarnation,
            tier=event_pb2.STORAGE_TIER_L1,
            backend=MEMORY,
            size_bytes=chunk.size,
        )


def identity(match: placement_pb2.BlendMatch) -> Found:
    return match.prompt_position, match.cached_position, match.chunk_key


def merge(
    local: dict[Found, placement_pb2.BlendMatch], fleet: Iterable[placement_pb2.BlendMatch], server_id: str
) -> list[placement_pb2.BlendMatch]:
    """By position, own matches first. The fleet's word on what this server holds is older than its own."""
    merged = dict(local)
    for match in fleet:
        others = [each for each in match.placements if each.server_id != server_id]
        known = merged.get(identity(match))
        if known is not None:
            # Coordinators know the same servers.
            told = {_place(each) for each in known.placements}
            known.placements.extend(each for each in others if _place(each) not in told)
        elif others:
            del match.placements[:]
            match.placements.extend(others)
            merged[identity(match)] = match
    return sorted(merged.values(), key=lambda each: (each.prompt_position, identity(each) not in local))


def _place(placement: placement_pb2.Placement) -> tuple[str, int, str]:
    return placement.server_id, placement.tier, placement.backend


async def ask_fleet(
    stubs: Sequence[Any], request: coordinator_service_pb2.MatchBlendRequest, seconds: float
) -> tuple[list[placement_pb2.BlendMatch], int]:
    """What all coordinators know that answer within `seconds`: one that was just started knows little."""
    if not stubs or seconds <= 0:
        return [], cache.FLEET_ANSWER_NOT_ASKED
    asked = [asyncio.ensure_future(_one(stub, request, seconds)) for stub in stubs]
    try:
        done, _ = await asyncio.wait(asked, timeout=seconds)
    finally:
        for each in asked:
            each.cancel()
    answers = [each.result() for each in done if not each.cancelled()]
    good = [matches for matches in answers if matches is not None]
    if not good:
        return [], cache.FLEET_ANSWER_NONE
    return [match for matches in good for match in matches], cache.FLEET_ANSWER_COMPLETE


async def _one(
    stub: Any, request: coordinator_service_pb2.MatchBlendRequest, seconds: float
) -> list[placement_pb2.BlendMatch] | None:
    """None for whatever is no answer: a connection may also be closed meanwhile by the membership itself."""
    try:
        reply = await stub.MatchBlend(request, timeout=seconds)
    except Exception as error:  # noqa: BLE001  (a fleet must not cost the matches that are here)
        log.debug("a coordinator did not answer a blend lookup: %r", error)
        return None
    return [match for match in reply.matches if _plausible(match, len(request.tokens) // TOKEN_BYTES)]


def _plausible(match: placement_pb2.BlendMatch, tokens: int) -> bool:
    return len(match.chunk_key) == DIGEST_SIZE and match.prompt_position < tokens


def not_enabled() -> NotImplementedYet:
    return NotImplementedYet(
        "This server matches prefixes only: start it with --enable-blend-lookup.", method="MatchBlend"
    )
