from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.errors import ConfigError
from kvwire.server.store.policy import ArcPolicy, LruPolicy
from kvwire.server.store.tenant_policy import TenantPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.server.store.policy import EvictionPolicy

POLICIES = ("lru", "arc", "tenant")


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """The policy for a pool of `capacity` bytes. Raises ConfigError for one that is not implemented."""
    makers: dict[str, Callable[[], EvictionPolicy]] = {
        "lru": LruPolicy,
        "arc": lambda: ArcPolicy(capacity),
        "tenant": TenantPolicy,
    }
    if name not in makers:
        raise ConfigError(
            f"Eviction policy {name!r} is not implemented; use one of: {', '.join(POLICIES)}.",
            setting="policy",
        )
    return makers[name]()
