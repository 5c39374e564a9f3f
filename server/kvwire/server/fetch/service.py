"""Where calls meet the prefetcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvwire.server.core import Core
    from kvwire.server.fetch.prefetcher import Brought
    from kvwire.server.lookups import Lacking

MARGIN_S: Final = 0.2
"""Kept of a call's deadline for the reply."""


async def bring(core: Core, lacking: Lacking, context: Any) -> Brought:
    """Bring what a lookup lacks, for as long as it may wait. The caller releases what it gets."""
    prefetcher = core.prefetcher
    patience = _patience(context.time_remaining(), core.config.prefetch_deadline)
    brought = await prefetcher.bring(lacking.space, lacking.keys, lacking.tokens, prefetcher.now() + patience)
    lacking.came = brought.origins
    core.absorb()
    return brought


def _patience(remaining: float | None, limit: float) -> float:
    return limit if remaining is None else max(0.0, min(limit, remaining - MARGIN_S))
