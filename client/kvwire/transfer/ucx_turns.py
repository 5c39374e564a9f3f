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
    """Used by the engine's thread only. A lease that its receiver does not take yet is in nobody's way."""

    def __init__(self) -> None:
        self._waiting: dict[Peer, dict[int, deque[UcxOp]]] = {}
        self._of_lease: Counter[tuple[Peer, int]] = Counter()
        self._of_peer: Counter[Peer] = Counter()

    def take(self, op: UcxOp, peer: Peer) -> bool:
        """Whether it may be sent now; else it waits, behind those of its lease."""
        prefix = tags.lease_prefix(op.tag)
        queue = self._waiting.get(peer, {}).get(prefix)
        if not queue and self._has_room(peer, prefix):
            self._count(peer, prefix)
            return True
        self._waiting.setdefault(peer, {}).setdefault(prefix, deque()).append(op)
        return False

    def ended(self, op: UcxOp, peer: Peer) -> UcxOp | None:
        """One that had its turn is over. The one whose turn it is then."""
        prefix = tags.lease_prefix(op.tag)
        self._of_lease[peer, prefix] -= 1
        self._of_peer[peer] -= 1
        if not self._of_lease[peer, prefix]:
            del self._of_lease[peer, prefix]
        if not self._of_peer[peer]:
            del self._of_peer[peer]
        queues = self._waiting.get(peer, {})
        for chosen in (prefix, *queues):
            if queues.get(chosen) and self._has_room(peer, chosen):
                following = queues[chosen].popleft()
                self._tidy(peer, chosen)
                self._count(peer, chosen)
                return following
        return None

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

    def _has_room(self, peer: Peer, prefix: int) -> bool:
        return self._of_lease[peer, prefix] < MAX_SENDS and self._of_peer[peer] < MAX_PEER_SENDS

    def _count(self, peer: Peer, prefix: int) -> None:
        self._of_lease[peer, prefix] += 1
        self._of_peer[peer] += 1

    def _tidy(self, peer: Peer, prefix: int) -> None:
        queues = self._waiting[peer]
        if not queues[prefix]:
            del queues[prefix]
            if not queues:
                del self._waiting[peer]
