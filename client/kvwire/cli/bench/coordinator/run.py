"""All measurements in their order, and the fields that are compared with goals."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Final

from kvwire.cli.bench.coordinator import directory, ingest, recovery, staleness, visible
from kvwire.cli.bench.coordinator.target import CORES, REST, coordinator, on_cores
from kvwire.cli.bench.processes import work_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvwire.cli.bench.coordinator.plan import Plan

BULK: Final = ("--expire-after=1h",)
"""Senders that make batches give no life signs meanwhile."""
COMPARED_KEYS: Final = 1_000_000


def run(plan: Plan, tell: Callable[[str], None]) -> dict[str, Any]:
    with work_folder() as folder, on_cores(REST):
        found = asyncio.run(_simulated(plan, folder, tell))
        seen = visible.measure(plan, folder, tell)
    taken, lookups = found["ingest"], found["directory"]
    compared = min(lookups["sizes"], key=lambda each: abs(each["keys"] - COMPARED_KEYS))
    fence = lookups["fence"]
    return {
        "ingest_per_s": taken["plain"]["per_s"],
        "ingest_with_tokens_per_s": taken["tokens"]["per_s"],
        "ingest_vs_parse": taken["plain"]["vs_parse"],
        "ingest_with_tokens_vs_parse": taken["tokens"]["vs_parse"],
        "locate_131072_vs_echo": compared["lookups"]["tokens_131072"]["vs_echo"],
        "bytes_per_key": compared["bytes_per_key"],
        "compared_at_keys": compared["keys"],
        "fence_max_heartbeat_ms": fence["heartbeat_during"]["max_ms"],
        "fence_max_lookup_ms": fence["lookup_during"]["max_ms"],
        "fenced_placements": fence["placements"],
        **seen,
        "cores": len(CORES) or os.cpu_count(),
        **found,
    }


async def _simulated(plan: Plan, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    with coordinator(folder, *BULK, name="ingest") as target:
        taken = await ingest.measure(plan, target, folder, tell)
    with coordinator(folder, *BULK, name="size") as target:
        sizes = await directory.measure(plan, target, folder, tell)
    with coordinator(folder, *BULK, name="stale") as target:
        stale = await staleness.measure(plan, target, folder, tell)
    healed = await recovery.measure(plan, folder, tell)
    return {"ingest": taken, "directory": sizes, "staleness": stale, "recovery": healed}
