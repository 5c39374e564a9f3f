"""What has to happen without anybody asking: expiry, snapshots, and freeing what was fenced."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvwire.coordinator.config import CoordinatorConfig
    from kvwire.coordinator.core import Core
    from kvwire.coordinator.pulls import Pulls

TICK_S: Final = 1.0
SWEEP_S: Final = 0.1
SLICE_ROWS: Final = 2000


def tick_interval(config: CoordinatorConfig) -> float:
    """Seconds; shorter where the settings are short."""
    return min(TICK_S, config.expire_after / 8, config.silent_after / 4, config.heartbeat)


async def tick(core: Core, pulls: Pulls) -> None:
    """For ever. Snapshots are also looked for right after something went missing."""
    interval = tick_interval(core.config)
    while True:
        core.fleet.tick(core.now())
        core.tell_changes()
        core.pulls_due.clear()
        pulls.start_due()
        core.servers.drop_stuck(core.now())
        core.events.drop_stuck(core.now())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval):
                await core.pulls_due.wait()


async def sweep(core: Core) -> None:
    """For ever: free fenced placements, slice by slice."""
    while True:
        left = core.fleet.sweep(SLICE_ROWS)
        await asyncio.sleep(0 if left else SWEEP_S)
