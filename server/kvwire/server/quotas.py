"""How much each tenant may have: as operators here say, and operators at coordinators."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from heapq import nlargest
from typing import TYPE_CHECKING, Final, Protocol

from kvwire.errors import InvalidArgument
from kvwire.serving.state import no_state
from kvwire.serving.tenants import digest_of, is_tenant, name_of
from kvwire.v1 import event_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvwire.server.store import L1Store
    from kvwire.serving.intents import IntentStore

log = logging.getLogger("kvwire.server")

L1: Final[int] = event_pb2.STORAGE_TIER_L1
L2: Final[int] = event_pb2.STORAGE_TIER_L2
MAX_LISTED: Final = 10_000
"""Tenants of one store that are listed for what they use."""
MEMORY: Final = "memory"
"""The backend's name of the memory tier."""

Limits = dict[tuple[str, int], int]
"""(tenant, tier) to bytes. A tenant is the digest of its salt, or NO_SALT."""


class TierUse(Protocol):
    """What is asked of the index of a lower tier. Tenants are digests here, "" without a salt."""

    def set_quotas(self, quotas: Mapping[str, int]) -> None: ...

    def tenants(self) -> Mapping[str, int]:
        """Bytes by tenant, of those that have any."""


@dataclass(frozen=True, slots=True)
class QuotaStatus:
    tenant: str
    tier: int
    backend: str
    limit: int
    used: int


class Quotas:
    """Of a server's own limit and those of its coordinators the smallest one holds.

    Quotas in memory need the policy "tenant". `own` is None without a state folder.
    """

    def __init__(self, memory: L1Store, own: IntentStore | None) -> None:
        self._memory = memory
        self._own = own
        self._fleet: dict[str, Limits] = {}
        self._lower: dict[str, TierUse] = {}
        self._apply()

    def attach(self, name: str, tier: TierUse) -> None:
        """A store of the tier L2, by the name of its backend."""
        self._lower[name] = tier
        tier.set_quotas(self._of_tier(L2))

    async def set(self, tenant: str, tier: int, limit: int) -> None:
        """Persisted when it returns; 0 bytes: no limit. What is above a lower one goes in the background.

        Raises InvalidArgument, TooManyItems, StateUnavailable; nothing is changed then.
        """
        if tier not in (L1, L2):
            raise InvalidArgument("tier", "is not set, or not known to this server: a quota is of one tier")
        if limit and not self._keeps(tier):
            raise InvalidArgument("tier", self._why_not(tier))
        if self._own is None:
            raise no_state()
        await self._own.set_quota(tenant, tier, limit)
        self._apply()

    def set_fleet(self, coordinator: str, limits: Limits) -> None:
        """All that a coordinator wants, instead of what it wanted before."""
        kept = {name: limit for name, limit in limits.items() if is_tenant(name[0]) and limit > 0}
        if self._fleet.get(coordinator, {}) == kept:
            return
        self._fleet[coordinator] = kept
        self._apply()
        self._warn(coordinator, kept)

    def started(self) -> None:
        """All tiers are attached. Says which quotas of the state folder do not hold any more."""
        if self._own is not None:
            self._warn("--state", self._own.intents.quotas)

    def listed(self, tenant: str = "") -> Iterator[QuotaStatus]:
        """Tenants (or one) that have a limit, and those that use most, tier by tier."""
        memory = {use.tenant: use.used for use in self._memory.tenants.uses() if use.used}
        yield from self._rows(L1, MEMORY, memory, tenant)
        for name, tier in self._lower.items():
            yield from self._rows(L2, name, tier.tenants(), tenant)

    def _rows(self, tier: int, backend: str, used: Mapping[str, int], tenant: str) -> Iterator[QuotaStatus]:
        limits = self._of_tier(tier)
        if tenant:
            shown = {digest_of(tenant)} & {*limits, *used}
        else:
            shown = {*limits, *nlargest(MAX_LISTED, used, key=lambda digest: used[digest])}
        for digest in sorted(shown):
            limit = limits.get(digest, 0)
            yield QuotaStatus(name_of(digest), tier, backend, limit, used.get(digest, 0))

    def _of_tier(self, tier: int) -> dict[str, int]:
        """The smallest limits, by digest."""
        found: dict[str, int] = {}
        own = self._own.intents.quotas if self._own is not None else {}
        for limits in (own, *self._fleet.values()):
            for (name, number), limit in limits.items():
                digest = digest_of(name)
                if number == tier:
                    found[digest] = min(limit, found.get(digest, limit))
        return found if self._keeps(tier) else {}

    def _apply(self) -> None:
        self._memory.tenants.set_limits(self._of_tier(L1))
        lower = self._of_tier(L2)
        for tier in self._lower.values():
            tier.set_quotas(lower)

    def _warn(self, who: str, limits: Limits) -> None:
        for tier in sorted({tier for _, tier in limits}):
            if not self._keeps(tier):
                log.warning("%s has quotas that do not hold here: %s", who, self._why_not(tier))

    def _keeps(self, tier: int) -> bool:
        return self._memory.policy.name == "tenant" if tier == L1 else bool(self._lower)

    def _why_not(self, tier: int) -> str:
        if tier == L1:
            return (
                f"quotas in memory need --policy tenant; this server has --policy {self._memory.policy.name}"
            )
        return "this server has no L2 tier that could keep quotas: give it one with --l2"
