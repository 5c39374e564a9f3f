"""What a benchmark shows while it runs (stderr) and when it is done (stdout)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from kvwire.cli import render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is being done; without a terminal, a line for each."""
    console = render.console(stderr=True)
    if not console.is_terminal:
        yield lambda text: console.print(f"{title}: {text}")
        return
    with console.status(f"{title}: starting") as status:
        yield lambda text: status.update(f"{title}: {text}")


def print_control(found: dict[str, Any]) -> None:
    rows = [("echo of 64 bytes", found["echo_p50_us"], found["echo_p99_us"], "1")]
    rows += [
        (name.replace("_", " "), call["p50_us"], call["p99_us"], f"{call['vs_echo']:.2f}")
        for name, call in found["calls"].items()
    ]
    render.print_rows(("one caller", "#p50 us", "#p99 us", "#vs echo"), rows)
    callers = found["callers"]
    render.print_rows(
        (f"{callers['processes']} callers", "#calls/s", "#vs echo"),
        [
            ("echo of 64 bytes", callers["echo_per_s"], "1"),
            ("lookup 8192 hit", callers["hit_per_s"], f"{callers['hit_vs_echo']:.2f}"),
            ("lookup 8192 miss", callers["miss_per_s"], f"{callers['miss_vs_echo']:.2f}"),
        ],
        title="\n",
    )
