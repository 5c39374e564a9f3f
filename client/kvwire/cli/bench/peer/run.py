"""The parts in their order, and the fields that are compared with goals."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvwire.cli.bench.peer import engines, restart, stale, transfer
from kvwire.cli.bench.peer.plan import ENGINES, RESTART, STALE, TRANSFER
from kvwire.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.cli.bench.peer.plan import Plan


def run(plan: Plan, progress: Callable[[str], None]) -> dict[str, Any]:
    """Parts that were not asked for are null. `skipped` says why one cannot be had here."""
    plan.check()
    found: dict[str, Any] = {
        "peer_vs_raw_socket": None,
        "peer_vs_memcpy": None,
        "ttft_peer_vs_recompute": None,
        "query_ttft_vs_without": None,
        "query_round_vs_without": None,
        "cores": os.cpu_count(),
        "skipped": {},
    }
    if TRANSFER in plan.parts:
        found["transfer"] = moved = transfer.measure(plan, progress)
        found["peer_vs_raw_socket"] = _of_largest(moved, "ucx-remote", "fetch_vs_raw_socket")
        found["peer_vs_memcpy"] = _of_largest(moved, "ucx-local", "fetch_vs_memcpy")
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        STALE: lambda: {"stale_lookups": stale.lookups(plan, progress)},
        RESTART: lambda: {"restart": restart.measure(plan, progress)},
        ENGINES: lambda: _engines(plan, progress),
    }
    for name, measure in parts.items():
        if name in plan.parts:
            try:
                found |= measure()
            except MissingExtra as error:
                found["skipped"][name] = str(error)
    return found


def _of_largest(moved: dict[str, Any], path: str, name: str) -> float | None:
    reports = [each for each in moved["paths"].get(path, {}).values() if isinstance(each, dict)]
    ratio: float | None = reports[-1][name] if reports else None
    return ratio


def _engines(plan: Plan, progress: Callable[[str], None]) -> dict[str, Any]:
    with engines.three_engines(plan, progress) as bench:
        first, rounds = engines.first_tokens(bench), engines.experiment(bench)
        told = {
            **{name: value for name, value in (*first.items(), *rounds.items()) if "_vs_" in name},
            "model": bench.model.name,
            "engines": {"prompt_tokens": plan.prompt_tokens, "threads": plan.threads, **first},
            "experiment": rounds,
        }
        if STALE in plan.parts:
            told["stale_ttft"] = stale.first_tokens(bench)
    return told
