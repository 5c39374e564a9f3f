"""kvwire for vLLM: the connector, which imports vLLM, and the adapters that it is made of."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvwire.vllm.adapters import (
        GroupBlocks,
        LoadStoreOp,
        SchedulerAdapter,
        Transfer,
        WorkerAdapter,
        striding_block_hashes,
        wrap_kv_caches,
    )
    from kvwire.vllm.connector import KvwireConnector

_HOMES: Final = {"KvwireConnector": "kvwire.vllm.connector"}
_ADAPTERS: Final = "kvwire.vllm.adapters"

__all__ = [
    "GroupBlocks",
    "KvwireConnector",
    "LoadStoreOp",
    "SchedulerAdapter",
    "Transfer",
    "WorkerAdapter",
    "striding_block_hashes",
    "wrap_kv_caches",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, _ADAPTERS)), name)


def __dir__() -> list[str]:
    return sorted(__all__)
