"""One prompt at one server: what was found of it, and its blocks in and out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from kvwire.client.jobs import NOT_WANTED, GroupBlocks, RetrieveResult, StoreResult, TransferJob
from kvwire.client.layout import GroupKind
from kvwire.client.types import SessionRange
from kvwire.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from kvwire.client.cache import KvCache
    from kvwire.client.layout import KvGroup
    from kvwire.client.types import LookupResult


class Session:
    """A prompt that was looked up. Close it, or use it in a `with` block, to let go of what was found."""

    def __init__(self, cache: KvCache, session_id: str, found: LookupResult) -> None:
        self.session_id = session_id
        self.found = found
        self._cache = cache
        self._chunk_size = cache.chunk_size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def hit_tokens(self) -> int:
        """The leading tokens whose KV can be retrieved; a multiple of the chunk size."""
        return self.found.hit_tokens

    @property
    def hit_chunks(self) -> int:
        return self.found.hit_chunks

    @property
    def num_chunks(self) -> int:
        """Whole chunks of the prompt."""
        return self.found.asked_chunks

    def store(
        self, block_ids: Sequence[int] | Sequence[Sequence[int]], *, first_chunk: int = 0
    ) -> StoreResult:
        """Store whole chunks from `first_chunk` on.

        `block_ids` is the block table of the prompt from its first token on, or one table for each KV group.
        The chunks that all tables cover are stored; those that the cache has already cost nothing.
        """
        tables = self._tables(block_ids)
        groups = self._cache.layout.groups
        covered = min(len(table) * group.span_tokens for table, group in zip(tables, groups, strict=True))
        stop = min(covered // self._chunk_size, self.num_chunks)
        if stop <= first_chunk:
            return StoreResult()
        chunks = range(first_chunk, stop)
        return self._cache.store([self._job(tables, [chunks] * len(groups))])[0]

    def retrieve(
        self, block_ids: Sequence[int] | Sequence[Sequence[int]], *, skip_tokens: int = 0
    ) -> RetrieveResult:
        """Fill the blocks of the tokens from `skip_tokens` up to `hit_tokens`, and no others.

        `block_ids` is the block table from the first token on, or one table for each KV group.
        `skip_tokens` is a multiple of the block size. Of a sliding window only what resuming at the hit
        needs is filled.
        """
        tables = self._tables(block_ids)
        if not 0 <= skip_tokens < self.hit_tokens:
            return RetrieveResult()
        groups = self._cache.layout.groups
        chunks = [self._needed(group, skip_tokens) for group in groups]
        for group, table in zip(groups, tables, strict=True):
            if skip_tokens % group.span_tokens:
                raise InvalidArgument("skip_tokens", f"{skip_tokens} is no multiple of {group.span_tokens}")
            if len(table) * group.span_tokens < self.hit_tokens:
                raise InvalidArgument(
                    "block_ids", f"{len(table)} blocks have no room for {self.hit_tokens} tokens"
                )
        return self._cache.retrieve([self._job(tables, chunks, skip_tokens)])[0]

    def close(self) -> None:
        """End the session at the server, without waiting for it. What was stored stays."""
        link = self._cache.link
        if link.is_reachable and link.registration_id:
            self._cache.client.end_sessions_quietly(link.registration_id, [self.session_id])

    def _needed(self, group: KvGroup, skip_tokens: int) -> range:
        first = skip_tokens // self._chunk_size
        if group.kind is GroupKind.FULL_ATTENTION:
            return range(first, self.hit_chunks)
        if group.kind is GroupKind.RECURRENT:
            return range(self.hit_chunks - 1, self.hit_chunks)
        window = -(-(group.window_tokens - 1) // self._chunk_size)
        return range(max(first, self.hit_chunks - window), self.hit_chunks)

    def _job(
        self, tables: Sequence[Sequence[int]], chunks: Sequence[range], skip_tokens: int = 0
    ) -> TransferJob:
        groups = tuple(
            self._group_blocks(index, tables[index], wanted, skip_tokens)
            for index, wanted in enumerate(chunks)
            if wanted
        )
        first = min(each.first_chunk for each in groups)
        stop = max(each.first_chunk + each.chunk_count for each in groups)
        return TransferJob(SessionRange(self.session_id, first, stop - first), groups)

    def _group_blocks(self, index: int, table: Sequence[int], chunks: range, skip_tokens: int) -> GroupBlocks:
        group = self._cache.layout.groups[index]
        in_chunk = self._chunk_size // group.span_tokens
        ids: list[int] = []
        for chunk in chunks:
            stop = (chunk + 1) * in_chunk
            for position in range(stop - group.blocks_per_object, stop):
                skipped = position * group.span_tokens < skip_tokens
                ids.append(NOT_WANTED if skipped else int(table[position]))
        return GroupBlocks(index, chunks.start, len(chunks), tuple(ids))

    def _tables(self, block_ids: Sequence[int] | Sequence[Sequence[int]]) -> list[Sequence[int]]:
        groups = len(self._cache.layout.groups)
        nested = len(block_ids) > 0 and hasattr(block_ids[0], "__len__")
        tables: list[Sequence[int]] = list(block_ids) if nested else [block_ids]  # type: ignore[list-item, arg-type]
        if len(tables) == 1 and groups > 1:
            tables *= groups
        if len(tables) != groups:
            raise InvalidArgument("block_ids", f"{len(tables)} block tables for {groups} KV groups")
        return tables
