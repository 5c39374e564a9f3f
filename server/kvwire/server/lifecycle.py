"""Clients come, go silent, disconnect and die; sessions end. What they hold ends with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.errors import ChunkSizeIncompatible, InvalidArgument
from kvwire.server.layout import ShardMap
from kvwire.server.messages import EndReason, Expired, Registered
from kvwire.server.spaces import base_of, identify

if TYPE_CHECKING:
    from kvwire.keys import Namespace
    from kvwire.server.layout import KvLayout
    from kvwire.server.messages import ClientInfo
    from kvwire.server.registry import Registration
    from kvwire.server.sessions import Session
    from kvwire.server.state import EngineState


class Lifecycle:
    """Begins and ends registrations and sessions, and ends leases in time."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def advance(self, now: float) -> int:
        """End the leases whose deadline has come. Returns how many."""
        due = self._state.leases.due(now)
        for lease in due:
            self._state.endings.end(lease, EndReason.EXPIRED)
        return len(due)

    def enter(self, registration_id: int, now: float) -> Registration:
        """The caller of a method, seen now. Raises NotRegistered."""
        self.advance(now)
        return self._state.registrations.require(registration_id, now)

    def register(
        self,
        client: ClientInfo,
        namespace: Namespace,
        layout: KvLayout,
        chunk_size: int,
        *,
        data_path: str,
        now: float,
    ) -> Registered:
        self.advance(now)
        bound = self._state.require_chunk_size()
        if chunk_size != bound:
            raise ChunkSizeIncompatible(
                f"The server's chunk size is {bound} tokens, not {chunk_size}: negotiate again.",
                bound_size=bound,
            )
        if namespace != base_of(namespace):
            raise InvalidArgument(
                "namespace", "of a registration has no adapter and no salt: lookups add them"
            )
        base_root = identify(namespace, bound).root
        registrations = self._state.registrations
        former = registrations.of_client(client.client_id)
        registration = registrations.add(
            client, namespace, base_root, ShardMap(layout, bound), data_path=data_path, now=now
        )
        if former is not None:
            # The client lives, and so do its sessions.
            registrations.remove(former.id)
            self._end_leases_of(former, EndReason.REPLACED)
        return Registered(registration.id, self._state.config.registration_ttl, former.id if former else 0)

    def unregister(self, registration_id: int) -> bool:
        registration = self.end_registration(registration_id, EndReason.UNREGISTERED)
        endings = self._state.endings
        client_id = registration.client.client_id if registration else endings.client_of(registration_id)
        if client_id is not None:
            endings.client_left(client_id)
        return registration is not None

    def end_registration(self, registration_id: int, reason: EndReason) -> Registration | None:
        """End a registration, its leases, and with an engine's last scheduler its sessions."""
        registrations = self._state.registrations
        registration = registrations.remove(registration_id)
        if registration is None:
            return None
        self._end_leases_of(registration, reason)
        client = registration.client
        if client.role != "worker" and not registrations.engine_has_scheduler(client.engine_id):
            for session in self._state.sessions.of_engine(client.engine_id):
                self.end_session(session, reason)
        return registration

    def end_session(self, session: Session, reason: EndReason) -> bool:
        """End exactly this session and its lookup lease. False when it has ended before."""
        if not self._state.sessions.remove(session):
            return False
        if session.lease is not None:
            self._state.endings.end(session.lease, reason)
        return True

    def expire(self, now: float) -> Expired:
        state = self._state
        leases = self.advance(now)
        idle = state.sessions.idle(now)
        sessions = sum(self.end_session(session, EndReason.EXPIRED) for session in idle)
        silent = state.registrations.silent_since(now - state.config.registration_ttl)
        for registration in silent:
            self.end_registration(registration.id, EndReason.EXPIRED)
        state.spaces.sweep({id(session.space) for session in state.sessions})
        return Expired(leases, sessions, tuple(registration.id for registration in silent))

    def _end_leases_of(self, registration: Registration, reason: EndReason) -> None:
        for lease in self._state.leases.of_owner(registration.id):
            self._state.endings.end(lease, reason)
