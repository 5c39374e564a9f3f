"""The fleet's page: what it shows, as JSON, once and as a stream. It only looks, and names no content."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import time
from collections import deque
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from kvwire.coordinator.messages import Reporting
from kvwire.coordinator.upkeep import tick_interval
from kvwire.serving.http import Response, Stream
from kvwire.serving.version import server_version

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from kvwire.coordinator.core import Core
    from kvwire.coordinator.fleet import MemberView
    from kvwire.serving.http import Route

MAX_SHOWN: Final = 500
MAX_LEFT: Final = 32
LEFT_S: Final = 600.0
"""How long a member that left is shown."""
RATES: Final = 60


class FleetPage:
    """`watch` runs for ever. `problem` says why the coordinator does not serve, or nothing."""

    def __init__(self, core: Core, problem: Callable[[], str]) -> None:
        self._core = core
        self._problem = problem
        self._interval = tick_interval(core.config)
        self._rates: deque[float] = deque([0.0] * RATES, maxlen=RATES)
        self._known: dict[str, MemberView] = {}
        self._left: dict[str, tuple[float, MemberView]] = {}
        self._turn = asyncio.Condition()
        self._message = b""
        self._page, self._policy = load_page()

    def routes(self) -> dict[str, Route]:
        def index(_headers: Mapping[str, str]) -> Response:
            headers = {
                "Content-Security-Policy": self._policy,
                "Referrer-Policy": "no-referrer",
                "X-Content-Type-Options": "nosniff",
            }
            return Response(self._page, "text/html; charset=utf-8", headers=headers)

        def state(_headers: Mapping[str, str]) -> Response:
            return Response(self._json(), "application/json")

        def events(_headers: Mapping[str, str]) -> Stream:
            return Stream(self._follow, "text/event-stream")

        return {"/": index, "/state.json": state, "/events": events}

    async def watch(self) -> None:
        """Each second, or more often where the settings are short: count events, note who left."""
        last, at = self._core.intake.stats.events, time.monotonic()
        while True:
            await asyncio.sleep(self._interval)
            events, now = self._core.intake.stats.events, time.monotonic()
            self._rates.append((events - last) / max(now - at, 1e-3))
            last, at = events, now
            self._note_members(now)
            self._message = b""
            async with self._turn:
                self._turn.notify_all()

    def _note_members(self, now: float) -> None:
        views = {view.info.server_id: view for view in self._core.fleet.views(self._core.now())}
        for server_id, view in self._known.items():
            if server_id not in views:
                self._left[server_id] = (now, view)
        self._known = views
        kept = [
            (server_id, left)
            for server_id, left in self._left.items()
            if server_id not in views and now - left[0] < LEFT_S
        ]
        self._left = dict(kept[-MAX_LEFT:])

    async def _follow(self) -> AsyncGenerator[bytes, None]:
        yield b"retry: 1000\n\n"
        while True:
            # One for all viewers of this turn.
            self._message = self._message or b"data: " + self._json() + b"\n\n"
            yield self._message
            async with self._turn:
                await self._turn.wait()

    def _json(self) -> bytes:
        return json.dumps(self.state(), separators=(",", ":")).encode()

    def state(self) -> dict[str, Any]:
        core = self._core
        views = core.fleet.views(core.now())
        now = time.monotonic()
        return {
            "version": server_version(),
            "incarnation": core.incarnation.hex(),
            "uptime": time.time() - core.started_at,
            "addresses": core.addresses,
            "problem": self._problem(),
            "heartbeat": core.config.heartbeat,
            "silent_after": core.config.silent_after,
            "interval": self._interval,
            "summary": self._summary(views),
            "rates": [round(rate, 1) for rate in self._rates],
            "members": [self._member(view) for view in _shown(views)],
            "left": [
                {"id": server_id, "ago": now - at, "addresses": view.info.addresses}
                for server_id, (at, view) in reversed(self._left.items())
            ],
        }

    def _summary(self, views: list[MemberView]) -> dict[str, Any]:
        core, fleet = self._core, self._core.fleet
        sizes, stats = fleet.directory.stats(), fleet.stats
        return {
            "members": len(views),
            "silent": sum(view.reporting is Reporting.SILENT for view in views),
            "apart": sum(bool(view.sharing_problem) for view in views),
            "keys": sizes.keys,
            "placements": sizes.placements,
            "bytes": sizes.placement_bytes,
            "chunk_size": fleet.members.chunk_size,
            "blend": core.config.enable_blend_lookup,
            "blend_chunks": len(fleet.blend) if fleet.blend is not None else 0,
            "checkpoint": core.checkpoint,
            "sources": core.sources,
            "events": core.intake.stats.events,
            "gaps": stats.gaps,
            "resyncs": stats.resyncs,
        }

    def _member(self, view: MemberView) -> dict[str, Any]:
        info, usage = view.info, view.usage
        return {
            "id": info.server_id,
            "addresses": info.addresses,
            "version": info.version,
            "chunk_size": info.chunk_size,
            "heartbeat_age": view.heartbeat_age,
            "reporting": str(view.reporting),
            "lag": self._core.intake.lag(info.server_id),
            "behind": max(view.closed_sequence - view.applied_sequence, 0),
            "tiers": [
                {"tier": f"L{each.tier}", "backend": each.backend, "used": each.used_bytes}
                | {"capacity": each.capacity_bytes}
                for each in usage.tiers
            ],
            "asked": usage.asked_tokens,
            "hit": usage.hit_tokens,
            "placements": view.placements,
            "problem": view.sharing_problem,
        }


def _shown(views: list[MemberView]) -> list[MemberView]:
    """By id; where there are too many, those with a problem stay."""
    if len(views) <= MAX_SHOWN:
        return views
    first = sorted(views, key=lambda view: view.reporting is Reporting.CURRENT and not view.sharing_problem)
    return sorted(first[:MAX_SHOWN], key=lambda view: view.info.server_id)


def load_page() -> tuple[bytes, str]:
    """The page, and the policy under which a browser runs its own script and style, and nothing else."""
    page = files("kvwire.coordinator").joinpath("web", "index.html").read_bytes()
    script, style = _hash(page, b"script"), _hash(page, b"style")
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy


def _hash(page: bytes, tag: bytes) -> str:
    found = re.search(b"<%s>(.*?)</%s>" % (tag, tag), page, re.DOTALL)
    if found is None:
        raise RuntimeError(f"the page has no {tag.decode()}")
    return f"'sha256-{base64.b64encode(sha256(found.group(1)).digest()).decode()}'"
