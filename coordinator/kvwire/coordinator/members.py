from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvwire.coordinator.incarnations import Incarnations, Standing
from kvwire.coordinator.messages import NO_USAGE
from kvwire.errors import IncarnationStale, InvalidArgument, ServerNotRegistered

if TYPE_CHECKING:
    from kvwire.coordinator.messages import ServerInfo, Usage

_MAX_ID_BYTES = 128
_INCARNATION_BYTES = 16


@dataclass(slots=True, eq=False)
class Member:
    """A cache server that is alive. `last_sequence`: the last batch that it has closed, as it said."""

    info: ServerInfo
    heartbeat_at: float
    used_bytes: int = 0
    last_sequence: int = 0
    sharing_problem: str = ""
    usage: Usage = NO_USAGE

    @property
    def sharing(self) -> bool:
        return not self.sharing_problem


@dataclass(frozen=True, slots=True)
class Joined:
    """What came of a registration. `new`: this run was no member before."""

    member: Member
    new: bool


@dataclass(slots=True)
class Changes:
    """Server ids, each once: `changed` includes new ones, and `left` is never one that is a member."""

    changed: dict[str, None] = field(default_factory=dict)
    left: dict[str, None] = field(default_factory=dict)


class Members:
    """Who is alive. The clock is passed in, monotonic, in seconds. The changes are told to `take_changes`.

    The fleet's chunk size and digest are those of the member that has been there longest and has a chunk size
    bound. Whoever differs is shown and kept apart: its keys mean nothing to the others.
    """

    def __init__(self, incarnations: Incarnations, expires_after: float = 30.0) -> None:
        self.expires_after = expires_after
        self._incarnations = incarnations
        self._members: dict[str, Member] = {}
        self._changes = Changes()

    def register(self, info: ServerInfo, now: float) -> Joined:
        """Raises InvalidArgument, and IncarnationStale for a run that has been replaced."""
        _validate(info)
        if self._incarnations.standing(info.server_id, info.incarnation) is Standing.SUPERSEDED:
            raise _stale(info.server_id)
        known = self._members.get(info.server_id)
        if known is not None and known.info.incarnation == info.incarnation:
            return self._renew(known, info, now)
        # Last in the order: a server that restarts with another chunk size must not set it for the fleet.
        self._members.pop(info.server_id, None)
        member = self._members[info.server_id] = Member(info, now)
        self._incarnations.note(info.server_id, info.incarnation)
        self._note(info.server_id)
        self._compare()
        return Joined(member, new=True)

    def heartbeat(
        self, server_id: str, incarnation: bytes, now: float, used_bytes: int = 0, last_sequence: int = 0
    ) -> Member:
        """Raises ServerNotRegistered, and IncarnationStale for a run that has been replaced."""
        member = self._members.get(server_id)
        if member is None or member.info.incarnation != incarnation:
            if self._incarnations.standing(server_id, incarnation) is Standing.SUPERSEDED:
                raise _stale(server_id)
            raise ServerNotRegistered(
                f"Cache server {server_id!r} is no member with this incarnation: register first.",
                server_id=server_id,
            )
        member.heartbeat_at = now
        member.used_bytes = used_bytes
        # Two heartbeats may overtake each other; a sequence never goes back.
        member.last_sequence = max(member.last_sequence, last_sequence)
        return member

    def deregister(self, server_id: str, incarnation: bytes) -> bool:
        """False: it is no member, or a newer run of it is, which stays."""
        member = self._members.get(server_id)
        if member is None or member.info.incarnation != incarnation:
            return False
        self._drop(server_id)
        return True

    def expire(self, now: float) -> list[str]:
        """Drop those without a life sign for `expires_after`; returns their ids."""
        silent = [
            server_id
            for server_id, member in self._members.items()
            if now - member.heartbeat_at > self.expires_after
        ]
        for server_id in silent:
            self._drop(server_id)
        return silent

    def __len__(self) -> int:
        return len(self._members)

    def get(self, server_id: str) -> Member | None:
        return self._members.get(server_id)

    def all(self) -> list[Member]:
        """By server id."""
        return [self._members[server_id] for server_id in sorted(self._members)]

    def changed(self, server_id: str) -> None:
        """Something that others keep of this member changed."""
        if server_id in self._members:
            self._note(server_id)

    def take_changes(self) -> Changes:
        taken, self._changes = self._changes, Changes()
        return taken

    @property
    def chunk_size(self) -> int:
        """The fleet's, in tokens; 0 while nobody has one."""
        terms = self._terms()
        return terms.chunk_size if terms else 0

    def _renew(self, member: Member, info: ServerInfo, now: float) -> Joined:
        member.heartbeat_at = now
        if member.info != info:
            member.info = info
            self._note(info.server_id)
            self._compare()
        return Joined(member, new=False)

    def _terms(self) -> ServerInfo | None:
        return next((member.info for member in self._members.values() if member.info.chunk_size), None)

    def _compare(self) -> None:
        terms = self._terms()
        for member in self._members.values():
            problem = _difference(member.info, terms) if terms else ""
            if problem != member.sharing_problem:
                member.sharing_problem = problem
                self._note(member.info.server_id)

    def _drop(self, server_id: str) -> None:
        del self._members[server_id]
        self._changes.changed.pop(server_id, None)
        self._changes.left[server_id] = None
        self._compare()

    def _note(self, server_id: str) -> None:
        self._changes.left.pop(server_id, None)
        self._changes.changed[server_id] = None


def _difference(info: ServerInfo, terms: ServerInfo) -> str:
    if info.chunk_size and info.chunk_size != terms.chunk_size:
        return (
            f"Its chunk size is {info.chunk_size}, the fleet's (by {terms.server_id!r}) {terms.chunk_size}: "
            f"start it with --chunk-size {terms.chunk_size}, or in a fleet of its own."
        )
    if info.digest != terms.digest:
        return (
            f"Its chunk keys are made with {info.digest or 'an unknown digest'}, the fleet's (by "
            f"{terms.server_id!r}) with {terms.digest or 'an unknown one'}: they never meet."
        )
    return ""


def _validate(info: ServerInfo) -> None:
    if not 1 <= len(info.server_id.encode()) <= _MAX_ID_BYTES:
        raise InvalidArgument("server.server_id", f"must have 1 to {_MAX_ID_BYTES} bytes")
    if len(info.incarnation) != _INCARNATION_BYTES:
        raise InvalidArgument(
            "server.incarnation", f"has {len(info.incarnation)} bytes instead of {_INCARNATION_BYTES}"
        )


def _stale(server_id: str) -> IncarnationStale:
    return IncarnationStale(
        f"A newer incarnation of cache server {server_id!r} is a member: this one has been replaced.",
        server_id=server_id,
    )
