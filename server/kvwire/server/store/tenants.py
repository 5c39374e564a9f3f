"""What each tenant has in the memory, and how much it may have. Bytes are exact, as allocated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvwire.server.store.objects import Chunk, Space


@dataclass(slots=True, eq=False, weakref_slot=True)
class TenantUse:
    """`tenant` is a digest of the salt, empty without one; `limit` is in bytes, 0: none.

    It lives as long as a namespace of its tenant does, so what it counts is never forgotten.
    """

    tenant: str
    limit: int = 0
    resident: int = 0
    reserved: int = 0
    quarantined: int = 0
    evictable: int = 0
    # Objects that were ever reserved: while it is the same, nothing has come.
    arrivals: int = 0
    # Chunks that no boundary can lean on: they go first.
    unreachable: dict[bytes, Chunk] = field(default_factory=dict, repr=False)

    @property
    def used(self) -> int:
        return self.resident + self.reserved + self.quarantined

    def excess(self, more: int = 0) -> int:
        """Bytes above the limit with `more` of them; 0 or less: it holds."""
        return self.used + more - self.limit if self.limit else 0


NOBODY = TenantUse("")
"""Of a namespace that has not stored anything yet."""


class Tenants:
    """All tenants of one store. Limits hold for those that come later, too."""

    def __init__(self) -> None:
        self.limits: dict[str, int] = {}
        self._known: WeakValueDictionary[str, TenantUse] = WeakValueDictionary()
        # May be above its limit: nothing but a lower limit brings a tenant there.
        self._over: dict[str, TenantUse] = {}

    def of(self, space: Space) -> TenantUse:
        if space.use is NOBODY:
            use = self._known.get(space.tenant)
            if use is None:
                use = TenantUse(space.tenant, self.limits.get(space.tenant, 0))
                self._known[space.tenant] = use
            space.use = use
        return space.use

    def uses(self) -> list[TenantUse]:
        return list(self._known.values())

    def get(self, tenant: str) -> TenantUse | None:
        return self._known.get(tenant)

    def limited(self) -> list[TenantUse]:
        """Those that have a limit."""
        return [use for use in self.uses() if use.limit] if self.limits else []

    def used(self, tenant: str) -> int:
        use = self._known.get(tenant)
        return use.used if use is not None else 0

    def set_limits(self, limits: dict[str, int]) -> None:
        """All limits there are, instead of the ones before."""
        self.limits = dict(limits)
        for use in self.uses():
            use.limit = limits.get(use.tenant, 0)
            if use.excess() > 0:
                self._over[use.tenant] = use

    def over(self) -> Iterable[TenantUse]:
        """Tenants above their limit, the one that has been there longest first."""
        if not self._over:
            return ()
        self._over = {name: use for name, use in self._over.items() if use.excess() > 0}
        return list(self._over.values())
