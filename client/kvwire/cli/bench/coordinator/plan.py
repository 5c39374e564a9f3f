from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. Batches are per sender and round; sizes are keys in the directory."""

    ingest_batches: int = 50
    token_batches: int = 15
    ingest_rounds: int = 5
    idle_s: float = 2.0
    settle_s: float = 0.5
    sizes: tuple[int, ...] = (10_000, 100_000, 1_000_000, 5_000_000)
    lookups: int = 40
    lookup_rounds: int = 10
    fenced: int = 1_000_000
    fence_watch_s: float = 3.0
    healed_keys: int = 100_000
    heal_rounds: int = 3
    delays: tuple[float, ...] = (0.0, 0.01, 0.1, 1.0)
    churns: tuple[float, ...] = (0.01, 0.1, 1.0)
    stale_s: float = 20.0
    visible_rounds: int = 50


QUICK: Final = Plan(
    ingest_batches=10,
    token_batches=4,
    ingest_rounds=2,
    idle_s=0.3,
    sizes=(10_000, 100_000),
    lookups=10,
    lookup_rounds=2,
    fenced=100_000,
    fence_watch_s=0.5,
    healed_keys=10_000,
    heal_rounds=1,
    delays=(0.0, 0.1),
    churns=(0.1, 1.0),
    stale_s=2.0,
    visible_rounds=5,
)
