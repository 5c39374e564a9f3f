"""The data paths of one server, behind one door."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvwire.errors import DataPathUnavailable
from kvwire.server.dataplane.base import (
    Admission,
    Opened,
    PathOffer,
    Received,
    ServerPath,
    ShmGrant,
    SlotMemory,
    UcxGrant,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "Admission",
    "DataPlane",
    "Opened",
    "PathOffer",
    "Received",
    "ServerPath",
    "ShmGrant",
    "SlotMemory",
    "UcxGrant",
]

PREFERENCE = ("shm", "ucx-local", "ucx-remote", "inline")


class DataPlane:
    """Chooses a path for each client. `off` says of the paths that this server lacks why it lacks them."""

    def __init__(self, paths: Mapping[str, ServerPath], off: Mapping[str, str]) -> None:
        self.paths = {name: paths[name] for name in PREFERENCE if name in paths}
        self.off = dict(off)

    async def admit(self, offers: Sequence[PathOffer]) -> Admission:
        """The best path that the client offers and that works here. Raises DataPathUnavailable."""
        offered = {offer.path: offer for offer in offers}
        skipped: dict[str, str] = {}
        for name in PREFERENCE:
            offer = offered.get(name)
            if offer is None:
                skipped[name] = "not offered by the client"
            elif name not in self.paths:
                skipped[name] = self.off.get(name, "switched off here")
            else:
                found = await self.paths[name].admit(offer)
                if isinstance(found, Admission):
                    return _explained(found, skipped)
                skipped[name] = found
        causes = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        raise DataPathUnavailable(
            f"No data path in common ({causes}).", offered=", ".join(sorted(offered)) or "none", **skipped
        )

    def path(self, name: str) -> ServerPath:
        return self.paths[name]

    async def close(self) -> None:
        await asyncio.gather(*(path.close() for path in self.paths.values()))


def _explained(admission: Admission, skipped: Mapping[str, str]) -> Admission:
    if not skipped:
        return admission
    causes = "; ".join(f"{name}: {why}" for name, why in skipped.items())
    return Admission(admission.path, f"{admission.reason} ({causes})", admission.grant, admission.token)
