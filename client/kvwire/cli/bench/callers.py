"""Several caller processes that start and stop together.

Run as a program it is one of them: a JSON line on its standard input says what to call, when to start and for
how long; the answer is the number of calls that ended in that time. It ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from kvwire.cli.bench.echo import PAYLOAD, echo_call, open_channel
from kvwire.cli.bench.processes import BenchError, let_end
from kvwire.cli.bench.prompts import Prompt, Prompts, lookup_request
from kvwire.keys import Namespace
from kvwire.v1 import cache_service_pb2 as pb
from kvwire.v1 import cache_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

READY: Final = "ready"
LEAD_S: Final = 0.05
"""Between the order and the start, so that all callers have read it."""
SESSIONS_PER_END: Final = 32
"""Sessions are ended in batches, as an engine does between its steps; the time counts, the calls do not."""


@dataclass(frozen=True, slots=True)
class Order:
    """`start` is on the system-wide monotonic clock."""

    kind: str
    start: float
    seconds: float


class Callers:
    """`count` processes, all with the same prompts and under the registration of `prompts`."""

    def __init__(
        self,
        count: int,
        prompts: Prompts,
        pair: tuple[Prompt, Prompt],
        addresses: tuple[str, str],
        folder: Path,
    ) -> None:
        argv = [sys.executable, "-m", "kvwire.cli.bench.callers", *addresses]
        argv += [str(prompts.registration_id), prompts.namespace.model]
        for name, prompt in zip(("hit", "miss"), pair, strict=True):
            file = folder / f"{name}.tokens"
            file.write_bytes(prompt.tokens)
            argv.append(str(file))
        self._count, self._argv = count, argv
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        for _ in range(self._count):
            self._processes.append(
                subprocess.Popen(self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        try:
            self._answers()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        for process in self._processes:
            let_end(process)

    def calls_per_s(self, kind: str, seconds: float) -> float:
        """Of all callers together. Kinds are "echo", "hit" and "miss"."""
        order = json.dumps(asdict(Order(kind, time.monotonic() + LEAD_S, seconds))) + "\n"
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.write(order)
                process.stdin.flush()
        return sum(int(answer) for answer in self._answers()) / seconds

    def _answers(self) -> list[str]:
        answers = [process.stdout.readline().strip() for process in self._processes if process.stdout]
        if not all(answers):
            raise BenchError("A caller process died; what it said is above.")
        return answers


class Caller:
    """One of the processes."""

    def __init__(
        self, echo: str, server: str, registration_id: int, model: str, files: dict[str, Path]
    ) -> None:
        self._echo = echo_call(open_channel(echo))
        self._stub: Any = cache_service_pb2_grpc.CacheServiceStub(open_channel(server))
        self._registration_id = registration_id
        self._numbers = itertools.count()
        self._requests = {
            kind: lookup_request(
                registration_id, "", Namespace(model=model), Prompt(file.read_bytes(), kind == "hit")
            )
            for kind, file in files.items()
        }
        self._open: list[str] = []

    def run(self, order: Order) -> int:
        call = self._call(order.kind)
        time.sleep(max(0.0, order.start - time.monotonic()))
        end = order.start + order.seconds
        calls = 0
        while True:
            call()
            if time.monotonic() >= end:
                break
            calls += 1
        self._end_sessions()
        return calls

    def _call(self, kind: str) -> Callable[[], object]:
        if kind == "echo":
            return lambda: self._echo(PAYLOAD)
        request = self._requests[kind]
        expected = len(request.tokens) // 4 if kind == "hit" else 0

        def lookup() -> None:
            request.session_id = f"caller-{os.getpid()}-{next(self._numbers)}"
            found = self._stub.Lookup(request).hit_tokens
            if found != expected:
                raise BenchError(f"A lookup found {found} tokens where {expected} were expected.")
            self._open.append(request.session_id)
            if len(self._open) == SESSIONS_PER_END:
                self._end_sessions()

        return lookup

    def _end_sessions(self) -> None:
        if self._open:
            self._stub.EndSession(
                pb.EndSessionRequest(registration_id=self._registration_id, session_ids=self._open)
            )
            self._open = []


def main(argv: list[str]) -> None:
    from pathlib import Path

    echo, server, registration_id, model, hit, miss = argv
    caller = Caller(echo, server, int(registration_id), model, {"hit": Path(hit), "miss": Path(miss)})
    for kind in ("echo", "hit", "miss"):
        caller.run(Order(kind, time.monotonic(), 0.0))
    print(READY, flush=True)
    for line in sys.stdin:
        print(caller.run(Order(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
