"""A server is killed: until the directory has nothing of it any more, and what lookups meet meanwhile."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from kvwire.cli.bench import stats
from kvwire.cli.bench.peer.fleet import EXPIRY_S, until
from kvwire.cli.bench.peer.small import small

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.cli.bench.peer.fleet import Fleet
    from kvwire.cli.bench.peer.plan import Plan
    from kvwire.cli.bench.peer.small import Prompt, Small
    from kvwire.v1 import coordinator_service_pb2 as pb

PAUSE_S: Final = 0.01


class Asking:
    """A thread that asks b for one prompt of a after the other."""

    def __init__(self, bench: Small, prompts: Sequence[Prompt]) -> None:
        self.seconds: list[float] = []
        self.hits = 0
        self._bench, self._prompts = bench, prompts
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            for prompt in self._prompts:
                seconds, chunks = self._bench.look_up(prompt)
                self.seconds.append(seconds)
                self.hits += chunks
                if self._ended.wait(PAUSE_S):
                    return


@dataclass(slots=True)
class Found:
    """Seconds from kill -9. `registered`: the new run is a member. `clean`: nothing of the old one is told.
    `expired`: the same for a server that stays away. `asked` are lookups meanwhile."""

    registered: list[float] = field(default_factory=list)
    clean: list[float] = field(default_factory=list)
    expired: list[float] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)
    hits: int = 0

    def report(self) -> dict[str, Any]:
        since = [gone - member for member, gone in zip(self.registered, self.clean, strict=True)]
        return {
            "clean_ms": _milliseconds(self.clean),
            "registered_ms": _milliseconds(self.registered),
            "clean_after_registered_ms": _milliseconds(since),
            "expired_ms": _milliseconds(self.expired),
            "expire_after_s": EXPIRY_S,
            "lookups_meanwhile": len(self.asked),
            "lookup_meanwhile_ms": {
                "median": _milliseconds(self.asked),
                "max": round(max(self.asked) * 1e3, 2),
            },
            "hits_meanwhile": self.hits,
        }


def measure(plan: Plan, progress: Callable[[str], None]) -> dict[str, Any]:
    found = Found()
    with small(plan, plan.restart_prompts) as bench:
        for number in range(plan.restarts):
            for again in (True, False):
                title = "restarted at once" if again else "stays away"
                progress(f"a server is killed, {title}: {number + 1} of {plan.restarts}")
                _killed(bench, plan.restart_prompts, found, again=again)
        placements = plan.restart_prompts * bench.chunks
    return {"placements": placements, "restarts": plan.restarts, **found.report()}


def _killed(bench: Small, count: int, found: Found, *, again: bool) -> None:
    running = bench.running
    prompts = bench.stored(count)
    bench.leave(running.a)
    running.b.settle()
    member = running.member(running.a)
    running.a.kill()
    killed = time.perf_counter()
    with Asking(bench, prompts) as asking:
        if again:
            running.a.start(wait=False)
            _watch(running, member, killed, found)
        else:
            until(lambda: not running.placements(running.a), "the dead server is forgotten")
            found.expired.append(time.perf_counter() - killed)
    found.asked += asking.seconds
    found.hits += asking.hits
    if not again:
        running.a.start()
    running.a.wait()
    bench.register(running.a)
    running.acquainted()
    running.emptied(running.b)


def _watch(running: Fleet, before: pb.Member | None, killed: float, found: Found) -> None:
    """Until the new run is a member, and the placements of the old one are gone."""
    old = before.server.incarnation if before is not None else b""

    def is_member() -> bool:
        member = running.member(running.a)
        return member is not None and member.server.incarnation != old

    until(is_member, "the restarted server is a member", pause=0.0)
    found.registered.append(time.perf_counter() - killed)
    until(lambda: not running.placements(running.a), "its old placements are gone", pause=0.0)
    found.clean.append(time.perf_counter() - killed)


def _milliseconds(seconds: list[float]) -> float:
    return round(stats.median(seconds) * 1e3, 2)
