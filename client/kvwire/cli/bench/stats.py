"""Numbers out of samples. Ratios are made inside a round, so that other load hits both sides."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of all samples do not exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered)) - 1))]


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def median_ratio(upper: Sequence[float], lower: Sequence[float]) -> float:
    """The median over rounds of upper / lower."""
    return median([above / below for above, below in zip(upper, lower, strict=True)])


def microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def mean(samples: Sequence[float]) -> float:
    return statistics.fmean(samples)
