"""Messages of the contract to the engine's values and back. Checks what the schema cannot say."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Final

from kvwire.client.status import to_item_error
from kvwire.errors import InvalidArgument, LayoutUnsupported, TokensInvalid
from kvwire.keys import DIGEST_SIZE, TOKEN_BYTES, ExtraInput
from kvwire.server.dataplane import PathOffer
from kvwire.server.layout import MAX_GROUPS, GroupKind, KvGroup, KvLayout
from kvwire.server.limits import MAX_OFFERED, check_extra_inputs
from kvwire.server.messages import (
    ClientInfo,
    CommitItem,
    KeyedChunks,
    ObjectRange,
    Prompt,
    ReleaseItem,
    RetrieveItem,
    Role,
    SessionRange,
    StoreItem,
)
from kvwire.serving import requests
from kvwire.serving.requests import check_count
from kvwire.v1 import cache_service_pb2 as cache
from kvwire.v1 import layout_pb2, transfer_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from google.protobuf.duration_pb2 import Duration

    from kvwire.server.config import ServerConfig

MAX_ID_BYTES: Final = 256

_KINDS: Final[dict[layout_pb2.KvGroupKind.ValueType, GroupKind]] = {
    layout_pb2.KV_GROUP_KIND_FULL_ATTENTION: "full",
    layout_pb2.KV_GROUP_KIND_SLIDING_WINDOW: "window",
    layout_pb2.KV_GROUP_KIND_RECURRENT: "recurrent",
}
_ROLES: Final[dict[cache.ClientRole.ValueType, Role]] = {
    cache.CLIENT_ROLE_SCHEDULER: "scheduler",
    cache.CLIENT_ROLE_WORKER: "worker",
    cache.CLIENT_ROLE_STANDALONE: "standalone",
}
PATHS: Final[dict[str, transfer_pb2.DataPath.ValueType]] = {
    "": transfer_pb2.DATA_PATH_UNSPECIFIED,
    "shm": transfer_pb2.DATA_PATH_SHM,
    "ucx-local": transfer_pb2.DATA_PATH_UCX_LOCAL,
    "ucx-remote": transfer_pb2.DATA_PATH_UCX_REMOTE,
    "inline": transfer_pb2.DATA_PATH_INLINE,
}
PATH_NAMES: Final = {number: name for name, number in PATHS.items()}
KIND_NUMBERS: Final[dict[GroupKind, layout_pb2.KvGroupKind.ValueType]] = {
    kind: number for number, kind in _KINDS.items()
}
ROLE_NUMBERS: Final[dict[Role, cache.ClientRole.ValueType]] = {
    role: number for number, role in _ROLES.items()
}


namespace = requests.namespace
duration = requests.duration


def client_info(request: cache.RegisterKvCacheRequest) -> ClientInfo:
    if len(request.client_id) != 16:
        raise InvalidArgument("client_id", f"has {len(request.client_id)} bytes, not 16")
    role = _ROLES.get(request.role)
    if role is None:
        raise InvalidArgument("role", "is not set, or not known to this server")
    return ClientInfo(
        client_id=request.client_id,
        engine_id=identifier("engine_id", request.engine_id),
        name=identifier("client_name", request.client_name, empty=True),
        role=role,
        kv_rank=request.kv_rank,
    )


def layout(message: layout_pb2.KvLayout) -> KvLayout:
    """Raises LayoutUnsupported. The rest of a layout is checked with the chunk size, by the engine."""
    if len(message.groups) > MAX_GROUPS:
        raise LayoutUnsupported(
            f"The KV layout cannot be cached: {len(message.groups)} groups are more than {MAX_GROUPS}.",
            problem="groups",
        )
    return KvLayout(
        message.world_size, tuple(_group(index, group) for index, group in enumerate(message.groups))
    )


def prompt(request: cache.LookupRequest, chunk_size: int, config: ServerConfig) -> Prompt:
    """Raises InvalidArgument, TokensInvalid or TooManyItems."""
    which = request.WhichOneof("prompt")
    if which is None:
        raise InvalidArgument("prompt", "is not set: give tokens or chunk_keys")
    if request.extra_inputs:
        check_extra_inputs(request.extra_inputs)
    space = namespace(request.namespace)
    if which == "chunk_keys":
        if request.extra_inputs:
            raise InvalidArgument("extra_inputs", "go with tokens only: keys have them inside")
        return Prompt(space, keys=chunk_keys("chunk_keys", request.chunk_keys.keys, config))
    tokens = request.tokens  # a copy each time
    if len(tokens) % TOKEN_BYTES:
        raise TokensInvalid(
            f"tokens has {len(tokens)} bytes: pack ids as little-endian uint32.",
            length=len(tokens),
        )
    check_count("chunks", len(tokens) // TOKEN_BYTES // chunk_size, config.max_chunks)
    extras = tuple(ExtraInput(extra.digest, extra.start, extra.length) for extra in request.extra_inputs)
    return Prompt(space, tokens=tokens, extras=extras)


def chunk_keys(field: str, keys: Iterable[bytes], config: ServerConfig) -> tuple[bytes, ...]:
    found = tuple(keys)
    check_count(field, len(found), config.max_chunks)
    for index, key in enumerate(found):
        if len(key) != DIGEST_SIZE:
            raise InvalidArgument(field, f"key {index} has {len(key)} bytes, not {DIGEST_SIZE}")
    return found


def identifier(field: str, text: str, *, empty: bool = False) -> str:
    if not text and not empty:
        raise InvalidArgument(field, "is empty")
    if len(text.encode()) > MAX_ID_BYTES:
        raise InvalidArgument(field, f"is longer than {MAX_ID_BYTES} bytes")
    if any(unicodedata.category(character) == "Cc" for character in text):
        raise InvalidArgument(field, "has a control character")
    return text


def offers(messages: Sequence[transfer_pb2.DataPathOffer]) -> list[PathOffer]:
    """Of paths that this server knows. Raises InvalidArgument, TooManyItems."""
    check_count("offers", len(messages), MAX_OFFERED)
    found = []
    for offer in messages:
        if len(offer.host_id) > 128 or len(offer.ucx_address) > 16384:
            raise InvalidArgument("offers", "host_id has at most 128 bytes, ucx_address at most 16 KiB")
        name = PATH_NAMES.get(offer.path)
        if name:
            found.append(PathOffer(name, offer.host_id, offer.ucx_address))
    return found


def release_item(item: cache.ReleaseLookupItem) -> ReleaseItem:
    return ReleaseItem(item.session_id, item.lease_id, item.first_chunk, item.chunk_count)


def store_item(item: cache.StoreItem, config: ServerConfig) -> StoreItem:
    return StoreItem(_target(item, config), _ranges(item.ranges))


def retrieve_item(item: cache.RetrieveItem, config: ServerConfig) -> RetrieveItem:
    return RetrieveItem(_target(item, config), _ranges(item.ranges))


def commit_item(item: cache.CommitStoreItem) -> CommitItem:
    checksums = tuple(item.checksums)
    if any(len(checksum) != 16 for checksum in checksums):
        raise InvalidArgument("checksums", "are xxh3-128, 16 bytes each")
    return CommitItem(item.lease_id, tuple(item.slots), checksums)


def seconds(value: Duration) -> float:
    """0 for what is not set or negative."""
    return max(0.0, value.seconds + value.nanos / 1e9)


item_error = to_item_error


def _group(index: int, group: layout_pb2.KvGroup) -> KvGroup:
    kind = _KINDS.get(group.kind)
    if kind is None:
        raise LayoutUnsupported(
            f"The KV layout cannot be cached: group {index} has no kind that this server knows.",
            group=index,
            problem="kind",
        )
    return KvGroup(
        kind=kind,
        span_tokens=group.span_tokens,
        window_tokens=group.window_tokens,
        num_layers=group.num_layers,
        block_bytes=group.block_bytes,
        blocks_per_object=group.blocks_per_object,
    )


def _target(item: cache.StoreItem | cache.RetrieveItem, config: ServerConfig) -> SessionRange | KeyedChunks:
    which = item.WhichOneof("target")
    if which == "session":
        part = item.session
        return SessionRange(part.session_id, part.first_chunk, part.chunk_count)
    if which == "keys":
        keys = item.keys
        return KeyedChunks(
            namespace(keys.namespace),
            chunk_keys("keys", keys.keys, config),
            keys.first_chunk,
            identifier("session_id", keys.session_id, empty=True),
        )
    raise InvalidArgument("target", "is not set: name a session or keys")


def _ranges(ranges: Iterable[cache.ObjectRange]) -> tuple[ObjectRange, ...]:
    return tuple(ObjectRange(part.group_index, part.first_chunk, part.chunk_count) for part in ranges)
