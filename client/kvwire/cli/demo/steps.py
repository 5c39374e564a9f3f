"""Progress of the demo on standard error: bars on a terminal, plain lines in a log."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Update = Callable[[str, float | None], None]


class Steps:
    def __init__(self) -> None:
        self._console = Console(stderr=True)

    @contextmanager
    def step(self, title: str) -> Iterator[Update]:
        """One step of work. The yielded function is told what goes on, and the share done or None."""
        if self._console.is_terminal:
            with self._bar(title) as update:
                yield update
        else:
            with self._lines(title) as update:
                yield update

    @contextmanager
    def _bar(self, title: str) -> Iterator[Update]:
        columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), BarColumn(24))
        with Progress(*columns, TimeElapsedColumn(), console=self._console) as progress:
            row = progress.add_task(title, total=None)

            def update(what: str, share: float | None) -> None:
                total = None if share is None else 1.0
                progress.update(row, description=f"{title}: {what}", total=total, completed=share or 0.0)

            yield update
            progress.update(row, description=title, total=1.0, completed=1.0)

    @contextmanager
    def _lines(self, title: str) -> Iterator[Update]:
        begin = time.monotonic()
        last = ""

        def update(what: str, _share: float | None) -> None:
            nonlocal last
            if what != last:
                self._say(f"{title}: {what}")
                last = what

        self._say(title)
        yield update
        self._say(f"{title}: done in {time.monotonic() - begin:.1f} s")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
