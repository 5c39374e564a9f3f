"""Where chunks are: what takes long is done in slices, so that life signs come in between."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kvwire.coordinator import convert
from kvwire.coordinator.steps import in_slices
from kvwire.errors import InvalidArgument, MessageTooLarge, NotImplementedYet
from kvwire.keys import TOKEN_BYTES
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import placement_pb2

if TYPE_CHECKING:
    from kvwire.coordinator.core import Core

DEFAULT_PAGE: Final = 100
MAX_PAGE: Final = 1000
SLICE_KEYS: Final = 2048


class Questions:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._fleet = core.fleet

    async def locate(self, request: pb.LocateChunksRequest) -> pb.LocateChunksResponse:
        """Raises InvalidArgument, TokensInvalid, TooManyItems, ChunkSizeNotNegotiated, MessageTooLarge."""
        keys = await self._keys(request)
        found = self._fleet.locate(keys)
        reply = pb.LocateChunksResponse(
            asked_chunks=found.asked,
            combined_prefix_chunks=found.combined,
            servers=self._prefixes(found.prefixes),
        )
        if request.with_placements:
            await self._add_placements(reply, keys)
        return reply

    async def match_blend(self, request: pb.MatchBlendRequest) -> pb.MatchBlendResponse:
        if not self._core.config.enable_blend_lookup:
            raise NotImplementedYet(
                "This coordinator has no blend index: start it with --enable-blend-lookup.",
                method="MatchBlend",
            )
        self._check_chunks(len(request.tokens))
        now = self._core.now()
        hits = self._fleet.match_blend(convert.namespace(request.namespace), request.tokens)
        return pb.MatchBlendResponse(
            matches=[
                placement_pb2.BlendMatch(
                    chunk_key=hit.key,
                    cached_position=hit.cached_position,
                    prompt_position=hit.prompt_position,
                    placements=convert.placements(placements, now),
                )
                for hit, placements in hits
            ]
        )

    def list_chunks(self, request: pb.ListChunksRequest) -> pb.ListChunksResponse:
        after = _page_key(request.page_token)
        size = min(request.page_size or DEFAULT_PAGE, MAX_PAGE)
        now = self._core.now()
        page = self._fleet.directory.page(after, size)
        reply = pb.ListChunksResponse()
        room = self._core.config.max_message // 2
        for key, placements in page:
            reply.chunks.append(convert.chunk(key, placements, now))
            room -= reply.chunks[-1].ByteSize()
            if room < 0:
                break
        if len(page) == size or room < 0:
            reply.next_page_token = reply.chunks[-1].chunk_key.hex()
        return reply

    async def _keys(self, request: pb.LocateChunksRequest) -> list[bytes]:
        which = request.WhichOneof("prompt")
        if which is None:
            raise InvalidArgument("prompt", "is not set: give tokens or chunk_keys")
        if which == "chunk_keys":
            convert.check_count("chunk_keys", len(request.chunk_keys.keys), self._core.config.max_keys)
            return list(request.chunk_keys.keys)
        self._check_chunks(len(request.tokens))
        return await in_slices(self._fleet.keys_steps(convert.namespace(request.namespace), request.tokens))

    def _check_chunks(self, token_bytes: int) -> None:
        chunk_size = self._fleet.members.chunk_size
        if chunk_size:
            chunks = token_bytes // TOKEN_BYTES // chunk_size
            convert.check_count("chunks of tokens", chunks, self._core.config.max_keys)

    def _prefixes(self, prefixes: tuple[tuple[str, int], ...]) -> list[pb.ServerPrefix]:
        members = self._fleet.members
        found = []
        for server_id, chunks in prefixes:
            member = members.get(server_id)
            addresses = member.info.addresses if member is not None else ()
            found.append(pb.ServerPrefix(server_id=server_id, addresses=addresses, prefix_chunks=chunks))
        return found

    async def _add_placements(self, reply: pb.LocateChunksResponse, keys: list[bytes]) -> None:
        directory, now = self._fleet.directory, self._core.now()
        for start in range(0, len(keys), SLICE_KEYS):
            if start:
                await asyncio.sleep(0)
            part = keys[start : start + SLICE_KEYS]
            reply.chunks.extend(convert.chunk(key, directory.placements(key), now) for key in part)
            self._check_size(reply)

    def _check_size(self, reply: pb.LocateChunksResponse) -> None:
        size, allowed = reply.ByteSize(), self._core.config.max_message
        if size > allowed:
            raise MessageTooLarge(
                f"The placements take more than {allowed} bytes: ask for fewer chunks.",
                actual=size,
                allowed=allowed,
            )


def _page_key(token: str) -> bytes:
    """Raises InvalidArgument."""
    try:
        key = bytes.fromhex(token)
    except ValueError:
        key = b"?"
    if len(key) not in {0, 32}:
        raise InvalidArgument("page_token", "is not one that this service gave")
    return key
