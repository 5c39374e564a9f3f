"""Who else is in the fleet, by each coordinator's word, and kept while a coordinator is away. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

KEEP_S: Final = 60.0
"""How long a member is kept that a coordinator, back again, has not told of yet."""

Place: TypeAlias = tuple[str, bytes]
"""Server id and incarnation: one run of one server."""


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """What a server says of itself. `shares`: it serves peers."""

    server_id: str
    incarnation: bytes
    addresses: tuple[str, ...]
    chunk_size: int
    digest_function: int
    shares: bool

    @property
    def place(self) -> Place:
        return self.server_id, self.incarnation


@dataclass(slots=True)
class _Told:
    info: PeerInfo
    turn: int
    drop_at: float | None = None


class Members:
    """All but this server. Each coordinator's view is its own: one may have seen a restart first."""

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self._views: dict[str, dict[str, _Told]] = {}
        self._turn = 0

    def began(self, coordinator: str) -> None:
        """It tells of all members from now on."""
        self._turn += 1
        self._views.setdefault(coordinator, {})

    def joined(self, coordinator: str, info: PeerInfo) -> None:
        """A member, new or changed."""
        if info.server_id != self._own_id:
            self._turn += 1
            self._views.setdefault(coordinator, {})[info.server_id] = _Told(info, self._turn)

    def left(self, coordinator: str, server_id: str) -> None:
        self._views.get(coordinator, {}).pop(server_id, None)

    def synced(self, coordinator: str, since: int, now: float) -> None:
        """It has told of all. `since` is the turn at which it began: the others may come back to it soon."""
        for told in self._views.get(coordinator, {}).values():
            if told.turn < since and told.drop_at is None:
                told.drop_at = now + KEEP_S

    @property
    def turn(self) -> int:
        """Counts whatever was told."""
        return self._turn

    def sweep(self, now: float) -> None:
        for view in self._views.values():
            for name in [
                name for name, told in view.items() if told.drop_at is not None and told.drop_at <= now
            ]:
                del view[name]

    def find(self, place: Place) -> PeerInfo | None:
        """That run of that server, if any coordinator thinks that it is there."""
        for view in self._views.values():
            told = view.get(place[0])
            if told is not None and told.info.incarnation == place[1]:
                return told.info
        return None

    def latest(self) -> list[PeerInfo]:
        """Each server as it was told of last, by name."""
        found: dict[str, _Told] = {}
        for view in self._views.values():
            for name, told in view.items():
                if name not in found or found[name].turn < told.turn:
                    found[name] = told
        return [found[name].info for name in sorted(found)]
