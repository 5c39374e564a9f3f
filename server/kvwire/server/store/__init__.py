"""The memory tier: index, allocation, eviction. Pure; time and ownership are the engine's business."""

from __future__ import annotations

from kvwire.server.store.allocator import ExtentAllocator
from kvwire.server.store.boundary import Hit, longest_boundary, needed_shards
from kvwire.server.store.events import Listeners, RemovedChunk, StoredChunk, StoreListener
from kvwire.server.store.l1 import L1Store
from kvwire.server.store.objects import Chunk, ObjectRef, ObjectState, Space, StoredObject
from kvwire.server.store.policies import POLICIES, make_policy
from kvwire.server.store.policy import ArcPolicy, EvictionPolicy, LruPolicy
from kvwire.server.store.tenant_policy import TenantPolicy
from kvwire.server.store.tenants import TenantUse

__all__ = [
    "POLICIES",
    "ArcPolicy",
    "Chunk",
    "EvictionPolicy",
    "ExtentAllocator",
    "Hit",
    "L1Store",
    "Listeners",
    "LruPolicy",
    "ObjectRef",
    "ObjectState",
    "RemovedChunk",
    "Space",
    "StoreListener",
    "StoredChunk",
    "StoredObject",
    "TenantPolicy",
    "TenantUse",
    "longest_boundary",
    "make_policy",
    "needed_shards",
]
