"""The client library: connect, look up, store and retrieve. Needs neither torch nor ucxx."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from kvwire.client.aio import AsyncClient
from kvwire.client.channel import MAX_MESSAGE_BYTES, Target, TlsConfig, parse_target
from kvwire.client.client import Client
from kvwire.client.deadlines import DEADLINES
from kvwire.client.layout import GroupKind, KvGroup, KvLayout, blocks_per_object
from kvwire.client.streams import AttachStream
from kvwire.client.types import (
    AttachEvent,
    ChunkRange,
    CommitItem,
    Committed,
    EndRetrieveItem,
    EventKind,
    KeyRange,
    KvEvent,
    KvEvents,
    Limits,
    LookupResult,
    Negotiated,
    ObjectRange,
    Offer,
    Path,
    Pong,
    Registered,
    Registration,
    Released,
    ReleaseItem,
    RetrieveGrant,
    Role,
    SessionRange,
    StoreGrant,
    TransferItem,
)

if TYPE_CHECKING:
    from kvwire.client.cache import AsyncKvCache, KvCache
    from kvwire.client.fingerprint import layout_fingerprint
    from kvwire.client.jobs import GroupBlocks, RetrieveResult, StoreResult, TransferJob
    from kvwire.client.session import Session

# These bring numpy along: they are imported when they are first asked for.
_LATER: Final = {
    "AsyncKvCache": "cache",
    "GroupBlocks": "jobs",
    "KvCache": "cache",
    "RetrieveResult": "jobs",
    "Session": "session",
    "StoreResult": "jobs",
    "TransferJob": "jobs",
    "layout_fingerprint": "fingerprint",
}

__all__ = [
    "DEADLINES",
    "MAX_MESSAGE_BYTES",
    "AsyncClient",
    "AsyncKvCache",
    "AttachEvent",
    "AttachStream",
    "ChunkRange",
    "Client",
    "CommitItem",
    "Committed",
    "EndRetrieveItem",
    "EventKind",
    "GroupBlocks",
    "GroupKind",
    "KeyRange",
    "KvCache",
    "KvEvent",
    "KvEvents",
    "KvGroup",
    "KvLayout",
    "Limits",
    "LookupResult",
    "Negotiated",
    "ObjectRange",
    "Offer",
    "Path",
    "Pong",
    "Registered",
    "Registration",
    "ReleaseItem",
    "Released",
    "RetrieveGrant",
    "RetrieveResult",
    "Role",
    "Session",
    "SessionRange",
    "StoreGrant",
    "StoreResult",
    "Target",
    "TlsConfig",
    "TransferItem",
    "TransferJob",
    "blocks_per_object",
    "layout_fingerprint",
    "parse_target",
]


def __getattr__(name: str) -> Any:
    home = _LATER.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
