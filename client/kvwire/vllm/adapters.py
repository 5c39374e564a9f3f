"""The adapters of an engine's scheduler and workers, under the names that integrations know.

No vLLM needed.
"""

from __future__ import annotations

from kvwire.client.jobs import GroupBlocks
from kvwire.vllm.adapters_common import LoadStoreOp, striding_block_hashes, wrap_kv_caches
from kvwire.vllm.adapters_scheduler import SchedulerAdapter
from kvwire.vllm.adapters_transfer import Transfer
from kvwire.vllm.adapters_worker import WorkerAdapter

__all__ = [
    "GroupBlocks",
    "LoadStoreOp",
    "SchedulerAdapter",
    "Transfer",
    "WorkerAdapter",
    "striding_block_hashes",
    "wrap_kv_caches",
]
