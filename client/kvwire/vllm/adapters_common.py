"""What both adapters are told, and the operations in the words of the engine."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvwire.client.client import Client
from kvwire.client.jobs import GroupBlocks, TransferJob
from kvwire.client.layout import KvLayout
from kvwire.client.types import KeyRange, SessionRange
from kvwire.errors import InvalidArgument
from kvwire.keys import Namespace, keys_from_block_hashes, root
from kvwire.keys import striding_block_hashes as _striding

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvwire.client.channel import TlsConfig

LayoutFor: TypeAlias = KvLayout | Callable[[int], KvLayout]
"""A layout, or what makes it for a chunk size: window groups depend on it."""

CLIENT_ID_BYTES: Final = 16


@dataclass(frozen=True)
class LoadStoreOp:
    """What to load or to store for one request.

    With `groups`, `block_ids` of each group has as many ids per chunk as an object has rows (-1: a row that a
    load leaves alone). Without, there is one group, and `block_ids` are the blocks of consecutive chunks.

    The chunks are named by `keys`, by `block_hashes` of the engine (one per block, or one per chunk), or else
    by the session that a lookup has made: `chunk_count` chunks from `first_chunk` on.
    """

    block_hashes: Sequence[bytes] = field(default=(), repr=False)
    block_ids: Sequence[int] = field(default=(), repr=False)
    groups: tuple[GroupBlocks, ...] = ()
    first_chunk: int = 0
    chunk_count: int = 0
    session_id: str = ""
    keys: tuple[bytes, ...] = field(default=(), repr=False)
    namespace: Namespace | None = None

    def all_block_ids(self) -> frozenset[int]:
        flat = (block for each in self.groups for block in each.block_ids)
        return frozenset(self.block_ids) | frozenset(block for block in flat if block >= 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """What the two adapters have in common."""

    server_url: str
    namespace: Namespace
    alignment: int
    engine_id: str
    client_name: str
    heartbeat_interval: float
    world_size: int
    kv_rank: int
    tls: TlsConfig | None
    token: str
    deadlines: Mapping[str, float] | None

    def client(self) -> Client:
        return Client(
            self.server_url,
            tls=self.tls,
            token=self.token,
            client_name=self.client_name,
            deadlines=self.deadlines,
        )


def adapter_options(
    server_url: str,
    model_name: str,
    world_size: int,
    kv_rank: int,
    vllm_block_size: int,
    *,
    alignment: int = 0,
    namespace: Namespace | None = None,
    engine_id: str = "",
    client_name: str = "",
    heartbeat_interval: float,
    tls: TlsConfig | None = None,
    token: str = "",
    deadlines: Mapping[str, float] | None = None,
) -> AdapterOptions:
    """Checked. Raises InvalidArgument for what cannot work whatever the server says."""
    if vllm_block_size < 1:
        raise InvalidArgument("vllm_block_size", f"{vllm_block_size} is not a number of tokens")
    if not 0 <= kv_rank < world_size:
        raise InvalidArgument("kv_rank", f"{kv_rank} is not below the world size {world_size}")
    space = namespace or Namespace(model_name)
    space.validate()
    return AdapterOptions(
        server_url=server_url,
        namespace=space,
        alignment=alignment or vllm_block_size,
        engine_id=engine_id or f"engine-{uuid.uuid4().hex}",
        client_name=client_name or f"kvwire adapter, process {os.getpid()}",
        heartbeat_interval=heartbeat_interval,
        world_size=world_size,
        kv_rank=kv_rank,
        tls=tls,
        token=token,
        deadlines=deadlines,
    )


def layout_for(layout: LayoutFor, chunk_size: int) -> KvLayout:
    return layout(chunk_size) if callable(layout) else layout


def tenant_space(base: Namespace, adapter: str, adapter_revision: str, salt: str) -> Namespace:
    """The namespace of one request."""
    if not (adapter or adapter_revision or salt):
        return base
    return replace(
        base,
        adapter=adapter or base.adapter,
        adapter_revision=adapter_revision or base.adapter_revision,
        salt=salt or base.salt,
    )


def striding_block_hashes(block_hashes: Iterable[bytes], blocks_in_chunk: int) -> Iterable[bytes]:
    """The last block hash of every whole chunk: hashes are chained, so it stands for all blocks before it."""
    return _striding(block_hashes, blocks_in_chunk)


def wrap_kv_caches(kv_caches: Mapping[str, Any]) -> list[Any]:
    """The tensors of all layers, in the engine's order."""
    return [cache[0] if isinstance(cache, (list, tuple)) else cache for cache in kv_caches.values()]


def hash_keys(
    namespace: Namespace, chunk_size: int, block_hashes: Sequence[bytes], stride: int
) -> list[bytes]:
    """Chunk keys for an engine that names its blocks by chained hashes, `stride` blocks to a chunk."""
    return keys_from_block_hashes(root(namespace, chunk_size), _striding(block_hashes, stride))


def transfer_job(
    request_id: str, op: LoadStoreOp, namespace: Namespace, chunk_size: int, blocks_in_chunk: int
) -> TransferJob:
    """The op in the client's words. Raises InvalidArgument for one that contradicts itself."""
    groups = op.groups or _flat_group(op, blocks_in_chunk)
    keys = op.keys or _hashed(op, namespace, chunk_size, blocks_in_chunk)
    session_id = op.session_id or request_id
    if keys:
        return TransferJob(KeyRange(op.namespace or namespace, keys, op.first_chunk, session_id), groups)
    count = op.chunk_count or max((g.first_chunk + g.chunk_count for g in groups), default=0) - op.first_chunk
    return TransferJob(SessionRange(session_id, op.first_chunk, count), groups)


def _flat_group(op: LoadStoreOp, blocks_in_chunk: int) -> tuple[GroupBlocks, ...]:
    count, rest = divmod(len(op.block_ids), blocks_in_chunk)
    if rest or not count:
        raise InvalidArgument(
            "block_ids", f"has {len(op.block_ids)} ids, which are no whole chunks of {blocks_in_chunk} blocks"
        )
    return (GroupBlocks(0, op.first_chunk, count, tuple(op.block_ids)),)


def _hashed(
    op: LoadStoreOp, namespace: Namespace, chunk_size: int, blocks_in_chunk: int
) -> tuple[bytes, ...]:
    if not op.block_hashes:
        return ()
    chunks = len(op.block_ids) // blocks_in_chunk if op.block_ids else op.chunk_count
    per_block = len(op.block_hashes) == chunks * blocks_in_chunk
    if not per_block and len(op.block_hashes) != chunks:
        raise InvalidArgument(
            "block_hashes",
            f"has {len(op.block_hashes)} hashes for {chunks} chunks of {blocks_in_chunk} blocks",
        )
    return tuple(
        hash_keys(op.namespace or namespace, chunk_size, op.block_hashes, blocks_in_chunk if per_block else 1)
    )
