"""The client library: connect, look up, store and retrieve. Needs neither torch nor ucxx."""

from __future__ import annotations

from kvwire.client.aio import AsyncClient
from kvwire.client.attach import AttachStream
from kvwire.client.channel import MAX_MESSAGE_BYTES, Target, TlsConfig, parse_target
from kvwire.client.client import Client
from kvwire.client.deadlines import DEADLINES
from kvwire.client.layout import GroupKind, KvGroup, KvLayout, blocks_per_object
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

__all__ = [
    "DEADLINES",
    "MAX_MESSAGE_BYTES",
    "AsyncClient",
    "AttachEvent",
    "AttachStream",
    "ChunkRange",
    "Client",
    "CommitItem",
    "Committed",
    "EndRetrieveItem",
    "EventKind",
    "GroupKind",
    "KeyRange",
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
    "Role",
    "SessionRange",
    "StoreGrant",
    "Target",
    "TlsConfig",
    "TransferItem",
    "blocks_per_object",
    "parse_target",
]
