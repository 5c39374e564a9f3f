"""The control plane against a bare echo: Ping, and lookups whose tokens the server hashes.

Echo and operation take turns in short rounds. Several trials start both servers anew: where a process happens
to lie makes a lasting difference. A lookup is what a scheduler sends: registered, leased, in a session
that the server has not seen, so that it hashes the whole prompt; sessions are ended between rounds.
"""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvwire.cli.bench import stats
from kvwire.cli.bench.callers import Callers
from kvwire.cli.bench.echo import PAYLOAD, echo_call, echo_server, open_channel
from kvwire.cli.bench.processes import BenchError, kvwire_server, work_folder
from kvwire.cli.bench.prompts import Prompt, Prompts, lookup_request
from kvwire.client import Client
from kvwire.v1 import cache_service_pb2 as pb
from kvwire.v1 import cache_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

LENGTHS: Final = (2048, 131072)
CALLERS_LENGTH: Final = 8192
SERVER_FLAGS: Final = ("--l1-size", "64MiB", "--data-paths", "inline")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: calls of each kind in a round, rounds in a trial, seconds of a callers' turn."""

    trials: int = 5
    rounds: int = 4
    echoes: int = 100
    pings: int = 100
    lookups: int = 40
    long_lookups: int = 12
    callers: int = 8
    caller_rounds: int = 2
    caller_s: float = 0.6


QUICK: Final = Plan(1, 2, 10, 10, 4, 2, 2, 1, 0.1)


@dataclass(slots=True)
class Series:
    """One operation: its samples, and for each round its p50 and that of the echoes around it."""

    samples: list[float] = field(default_factory=list)
    p50: list[float] = field(default_factory=list)
    echo_p50: list[float] = field(default_factory=list)

    def add(self, samples: list[float], echo_p50: float) -> None:
        self.samples += samples
        self.p50.append(stats.median(samples))
        self.echo_p50.append(echo_p50)

    def summary(self) -> dict[str, float]:
        return {
            "p50_us": stats.microseconds(stats.median(self.p50)),
            "p99_us": stats.microseconds(stats.percentile(self.samples, 0.99)),
            "vs_echo": round(stats.median_ratio(self.p50, self.echo_p50), 3),
        }


@dataclass(slots=True)
class Results:
    """What all trials found. `callers` has calls per second by kind, one entry per round."""

    echo: Series = field(default_factory=Series)
    calls: dict[str, Series] = field(default_factory=dict)
    callers: dict[str, list[float]] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)


def run(plan: Plan, progress: Callable[[str], None]) -> dict[str, Any]:
    results = Results()
    for number in range(1, plan.trials + 1):

        def tell(text: str, trial: str = f"trial {number} of {plan.trials}") -> None:
            progress(f"{trial}, {text}")

        _trial(plan, results, tell)
    return _report(results, plan)


def _trial(plan: Plan, results: Results, progress: Callable[[str], None]) -> None:
    progress("starting the servers")
    with work_folder() as folder, echo_server(folder) as echo, kvwire_server(folder, SERVER_FLAGS) as server:
        with Client(server, client_name="kvwire bench control") as client:
            progress("storing the prompts that will be found")
            prompts = Prompts(client)
            known = {length: (prompts.stored(length), prompts.absent(length)) for length in LENGTHS}
            _Latency(echo, prompts, server, results).measure(plan, known, progress)
            _throughput(plan, prompts, (echo, server), folder, results, progress)
            version = client.status().server_version
        results.server = {"chunk_size": prompts.chunk_size, "server_version": version}


class _Latency:
    """One caller, one call at a time, over one channel to each server."""

    def __init__(self, echo: str, prompts: Prompts, server: str, results: Results) -> None:
        self._results = results
        self._echo_channel, self._channel = open_channel(echo), open_channel(server)
        self._echo = echo_call(self._echo_channel)
        self._stub: Any = cache_service_pb2_grpc.CacheServiceStub(self._channel)
        self._prompts = prompts
        self._sessions = (f"lookup-{os.getpid()}-{number}" for number in itertools.count())

    def measure(
        self,
        plan: Plan,
        known: dict[int, tuple[Prompt, Prompt]],
        progress: Callable[[str], None],
    ) -> None:
        try:
            kinds = self._kinds(plan, known)
            for number in range(plan.rounds + 1):
                progress(
                    f"one caller, round {number} of {plan.rounds}" if number else "one caller, warming up"
                )
                self._round(plan, kinds, keep=number > 0)
        finally:
            self._echo_channel.close()
            self._channel.close()

    def _kinds(
        self, plan: Plan, known: dict[int, tuple[Prompt, Prompt]]
    ) -> dict[str, Callable[[], list[float]]]:
        ping = pb.PingRequest(registration_id=self._prompts.registration_id)
        kinds: dict[str, Callable[[], list[float]]] = {
            "ping": lambda: timed(self._stub.Ping, [ping] * plan.pings)
        }
        for length, pair in known.items():
            count = plan.lookups if length <= CALLERS_LENGTH else plan.long_lookups
            for prompt in pair:
                name = f"lookup_{length}_{'hit' if prompt.hit else 'miss'}"
                kinds[name] = lambda prompt=prompt, count=count: self._lookups(prompt, count)  # type: ignore[misc]
        return kinds

    def _round(self, plan: Plan, kinds: dict[str, Callable[[], list[float]]], *, keep: bool) -> None:
        before = timed(self._echo, [PAYLOAD] * plan.echoes)
        for name, operation in kinds.items():
            samples = operation()
            after = timed(self._echo, [PAYLOAD] * plan.echoes)
            if keep:
                around = stats.median([*before, *after])
                self._results.calls.setdefault(name, Series()).add(samples, around)
                self._results.echo.add(after, around)
            before = after

    def _lookups(self, prompt: Prompt, count: int) -> list[float]:
        registration, namespace = self._prompts.registration_id, self._prompts.namespace
        sessions = [next(self._sessions) for _ in range(count)]
        requests = [lookup_request(registration, session, namespace, prompt) for session in sessions]
        replies: list[pb.LookupResponse] = []
        seconds = timed(self._stub.Lookup, requests, replies)
        expected = len(prompt) if prompt.hit else 0
        wrong = [reply.hit_tokens for reply in replies if reply.hit_tokens != expected]
        if wrong:
            raise BenchError(f"A lookup found {wrong[0]} tokens where {expected} were expected.")
        self._stub.EndSession(pb.EndSessionRequest(registration_id=registration, session_ids=sessions))
        return seconds


def timed(
    call: Callable[[Any], Any], requests: Sequence[Any], replies: list[Any] | None = None
) -> list[float]:
    """Seconds of each call, one after the other."""
    seconds = []
    for request in requests:
        started = time.perf_counter()
        reply = call(request)
        seconds.append(time.perf_counter() - started)
        if replies is not None:
            replies.append(reply)
    return seconds


def _throughput(
    plan: Plan,
    prompts: Prompts,
    addresses: tuple[str, str],
    folder: Path,
    results: Results,
    progress: Callable[[str], None],
) -> None:
    progress(f"starting {plan.callers} callers")
    pair = prompts.stored(CALLERS_LENGTH), prompts.absent(CALLERS_LENGTH)
    with Callers(plan.callers, prompts, pair, addresses, folder) as callers:
        for number in range(plan.caller_rounds + 1):
            told = f"round {number} of {plan.caller_rounds}" if number else "warming up"
            progress(f"{plan.callers} callers, {told}")
            for kind in ("echo", "hit", "miss"):
                rate = callers.calls_per_s(kind, plan.caller_s)
                if number:
                    results.callers.setdefault(kind, []).append(rate)


def _report(results: Results, plan: Plan) -> dict[str, Any]:
    calls = {name: series.summary() for name, series in results.calls.items()}
    rates = results.callers
    vs_echo = {kind: stats.median_ratio(rates[kind], rates["echo"]) for kind in ("hit", "miss")}
    return {
        "echo_p50_us": stats.microseconds(stats.median(results.echo.p50)),
        "echo_p99_us": stats.microseconds(stats.percentile(results.echo.samples, 0.99)),
        "ping_vs_echo": calls["ping"]["vs_echo"],
        # The worse of hit and miss: a user meets both.
        **{
            f"lookup_{length}_vs_echo": max(
                calls[f"lookup_{length}_{kind}"]["vs_echo"] for kind in ("hit", "miss")
            )
            for length in LENGTHS
        },
        f"lookups_{CALLERS_LENGTH}_8callers_vs_echo": round(min(vs_echo.values()), 3),
        "calls": calls,
        "callers": {
            "processes": plan.callers,
            **{f"{kind}_per_s": round(stats.median(found)) for kind, found in rates.items()},
            **{f"{kind}_vs_echo": round(ratio, 3) for kind, ratio in vs_echo.items()},
        },
        "trials": plan.trials,
        "rounds": plan.rounds,
        **results.server,
    }
