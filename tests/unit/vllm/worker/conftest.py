from __future__ import annotations

from support.worker_adapter import kv, make, server

__all__ = ["kv", "make", "server"]
