"""Which sends may be under way at once, and which wait for their turn."""

from __future__ import annotations

from collections import Counter, deque
from itertools import chain
from typing import TYPE_CHECKING, Final

from kvwire.transfer import tags

if TYPE_CHECKING:
    from kvwire.transfer.ucx_ops import Peer, UcxOp

MAX_SENDS: Final = 16
"""Messages of one lease under way."""
MAX_PEER_SENDS: Final = 128
"""Messages under way to one peer. More could fill its queue, which cannot be flushed when it dies."""


class Turns:
    """Used by whoever has the lane's turn. A lease that its receiver does not take yet is in nobody's way."""

    def __init__(self, lease_bytes: int) -> None:
        """`lease_bytes`: what one lease may have under way, but for a single message that is larger.

        Messages share the way, so with too many of them the first one arrives as late as the last.
        """
        self._lease_bytes = lease_bytes
        self._waiting: dict[Peer, dict[int, deque[UcxOp]]] = {}
        self._of_lease: Counter[tuple[Peer, int]] = Counter()
        self._bytes: Counter[tuple[Peer, int]] = Counter()
        self._of_peer: Counter[Peer] = Counter()

    def take(self, op: UcxOp, peer: Peer) -> bool:
        """Whether it may be sent now; else it waits, behind those of its lease."""
        prefix = tags.lease_prefix(op.tag)
        queue = self._waiting.get(peer, {}).get(prefix)
        if not queue and self._has_room(op, peer, prefix):
            self._count(op, peer, prefix)
            return True
        self._waiting.setdefault(peer, {}).setdefault(prefix, deque()).append(op)
        return False

    def ended(self, op: UcxOp, peer: Peer) -> list[UcxOp]:
        """One that had its turn is over. Those whose turn it is then."""
        prefix = tags.lease_prefix(op.tag)
        self._of_lease[peer, prefix] -= 1
        self._bytes[peer, prefix] -= op.nbytes
        self._of_peer[peer] -= 1
        if not self._of_lease[peer, prefix]:
            del self._of_lease[peer, prefix], self._bytes[peer, prefix]
        if not self._of_peer[peer]:
            del self._of_peer[peer]
        following: list[UcxOp] = []
        queues = self._waiting.get(peer, {})
        for chosen in (prefix, *queues):
            while queues.get(chosen) and self._has_room(queues[chosen][0], peer, chosen):
                following.append(queues[chosen].popleft())
                self._count(following[-1], peer, chosen)
                self._tidy(peer, chosen)
        return following

    def forget(self, op: UcxOp) -> None:
        """It does not wait any more."""
        prefix = tags.lease_prefix(op.tag)
        queue = self._waiting.get(op.peer, {}).get(prefix) if op.peer is not None else None
        if queue and op.peer is not None and op in queue:
            queue.remove(op)
            self._tidy(op.peer, prefix)

    def drop(self, peer: Peer) -> list[UcxOp]:
        """Those of a peer that wait."""
        return list(chain.from_iterable(self._waiting.pop(peer, {}).values()))

    def _has_room(self, op: UcxOp, peer: Peer, prefix: int) -> bool:
        key = (peer, prefix)
        fits = not self._of_lease[key] or self._bytes[key] + op.nbytes <= self._lease_bytes
        return fits and self._of_lease[key] < MAX_SENDS and self._of_peer[peer] < MAX_PEER_SENDS

    def _count(self, op: UcxOp, peer: Peer, prefix: int) -> None:
        self._of_lease[peer, prefix] += 1
        self._bytes[peer, prefix] += op.nbytes
        self._of_peer[peer] += 1

    def _tidy(self, peer: Peer, prefix: int) -> None:
        queues = self._waiting[peer]
        if not queues[prefix]:
            del queues[prefix]
            if not queues:
                del self._waiting[peer]
