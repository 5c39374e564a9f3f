"""The data plane: what moves the bytes of KV between an engine's pages and a server's arena.

Nothing here speaks gRPC. torch and ucxx are imported where they are used, never at import of this package.
"""

from __future__ import annotations

from kvwire.transfer.base import DataPath, Drain, Fill, Slot, SlotResult, Ticket

__all__ = ["DataPath", "Drain", "Fill", "Slot", "SlotResult", "Ticket"]
