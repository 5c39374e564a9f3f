from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvwire.errors import InvalidArgument, LayoutConflict, NotRegistered, TooManySessions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.keys import Namespace
    from kvwire.server.layout import ShardMap
    from kvwire.server.messages import ClientInfo


@dataclass(slots=True, eq=False)
class Registration:
    """`namespace` has no adapter and no salt; `base_root` is its root."""

    id: int
    client: ClientInfo
    namespace: Namespace
    base_root: bytes
    shards: ShardMap
    data_path: str
    last_seen: float

    @property
    def server_moves_bytes(self) -> bool:
        """Whether operations of this server, rather than the client's own, touch the slots of its leases."""
        return self.data_path.startswith("ucx") or self.data_path == "inline"


@dataclass(slots=True, eq=False)
class LayoutRecord:
    """The one layout of a base namespace, for as long as a registration uses it."""

    namespace: Namespace
    shards: ShardMap
    users: set[int] = field(default_factory=set)


class Registrations:
    """Who is registered, and which layout each base namespace has."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_id: dict[int, Registration] = {}
        self._by_client: dict[bytes, Registration] = {}
        self._layouts: dict[bytes, LayoutRecord] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Registration]:
        return iter(self._by_id.values())

    @property
    def layouts(self) -> dict[bytes, LayoutRecord]:
        """By root of the base namespace."""
        return self._layouts

    def get(self, registration_id: int) -> Registration | None:
        return self._by_id.get(registration_id)

    def of_client(self, client_id: bytes) -> Registration | None:
        return self._by_client.get(client_id)

    def require(self, registration_id: int, now: float) -> Registration:
        """The registration, seen at `now`. Raises NotRegistered."""
        registration = self._by_id.get(registration_id)
        if registration is None:
            raise NotRegistered(
                f"Registration {registration_id} is not known to this server: negotiate and register again.",
                registration_id=registration_id,
            )
        registration.last_seen = now
        return registration

    def layout_of(self, base_root: bytes) -> ShardMap | None:
        record = self._layouts.get(base_root)
        return record.shards if record else None

    def add(
        self,
        client: ClientInfo,
        namespace: Namespace,
        base_root: bytes,
        shards: ShardMap,
        *,
        data_path: str,
        now: float,
    ) -> Registration:
        """A new registration beside the client's former one, which the caller removes after.

        Raises LayoutConflict, InvalidArgument or TooManySessions and changes nothing.
        """
        shards = self._agreed_shards(client, base_root, shards)
        _check_client(client, shards.layout.world_size)
        former = self._by_client.get(client.client_id)
        if len(self._by_id) - (former is not None) >= self._limit:
            raise TooManySessions(
                f"The server has {self._limit} registered clients, its limit.", allowed=self._limit
            )
        registration = Registration(
            self._new_id(), client, namespace, base_root, shards, data_path, last_seen=now
        )
        record = self._layouts.get(base_root)
        if record is None or record.shards is not shards:
            record = self._layouts[base_root] = LayoutRecord(namespace, shards)
        record.users.add(registration.id)
        self._by_id[registration.id] = registration
        self._by_client[client.client_id] = registration
        return registration

    def remove(self, registration_id: int) -> Registration | None:
        """Forget it; its layout goes with the last user. None when it is not known (any more)."""
        registration = self._by_id.pop(registration_id, None)
        if registration is None:
            return None
        if self._by_client.get(registration.client.client_id) is registration:
            del self._by_client[registration.client.client_id]
        record = self._layouts[registration.base_root]
        record.users.discard(registration_id)
        if not record.users:
            del self._layouts[registration.base_root]
        return registration

    def silent_since(self, deadline: float) -> list[Registration]:
        return [registration for registration in self if registration.last_seen <= deadline]

    def engine_has_scheduler(self, engine_id: str) -> bool:
        return any(
            registration.client.engine_id == engine_id and registration.client.role != "worker"
            for registration in self
        )

    def _agreed_shards(self, client: ClientInfo, base_root: bytes, shards: ShardMap) -> ShardMap:
        record = self._layouts.get(base_root)
        if record is None or record.shards.same_as(shards):
            return record.shards if record else shards
        former = self._by_client.get(client.client_id)
        others = record.users - ({former.id} if former else set())
        if others:
            other = self._by_id[min(others)].client
            raise LayoutConflict(
                f"{other.name or other.engine_id!r} is registered for the model with another KV layout."
                " Give the two engines different namespaces (layout_fingerprint, revision), or stop one.",
                client_name=other.name,
                engine_id=other.engine_id,
            )
        return shards

    def _new_id(self) -> int:
        while True:
            candidate = secrets.randbits(63)
            if candidate and candidate not in self._by_id:
                return candidate


def _check_client(client: ClientInfo, world_size: int) -> None:
    if not client.client_id:
        raise InvalidArgument("client_id", "is empty")
    if not client.engine_id:
        raise InvalidArgument("engine_id", "is empty")
    if client.role not in ("scheduler", "worker", "standalone"):
        raise InvalidArgument("role", f"{client.role!r} is not a role")
    if not 0 <= client.kv_rank < world_size:
        raise InvalidArgument("kv_rank", f"{client.kv_rank} is not below world_size {world_size}")
