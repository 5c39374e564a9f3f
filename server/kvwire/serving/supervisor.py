"""Background tasks that are watched: one that dies is logged, counted and turns the server's health off."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

log = logging.getLogger("kvwire.serving")


@dataclass(frozen=True, slots=True)
class TaskState:
    """`error` is empty while the task runs or after it ended as asked."""

    name: str
    running: bool
    error: str


class Supervisor:
    """Owns named tasks. `on_death(name)` is called on the loop when one ends without having been stopped."""

    def __init__(self, on_death: Callable[[str], None]) -> None:
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._errors: dict[str, str] = {}
        self._on_death = on_death
        self._stopping = False

    def start(self, name: str, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine, name=f"kvwire-{name}")
        self._tasks[name] = task
        task.add_done_callback(lambda ended: self._ended(name, ended))

    def states(self) -> tuple[TaskState, ...]:
        return tuple(
            TaskState(name, not task.done(), self._errors.get(name, "")) for name, task in self._tasks.items()
        )

    @property
    def deaths(self) -> int:
        return len(self._errors)

    async def stop(self) -> None:
        self._stopping = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _ended(self, name: str, task: asyncio.Task[Any]) -> None:
        if self._stopping:
            return
        error = None if task.cancelled() else task.exception()
        self._errors[name] = f"{type(error).__name__}: {error}" if error else "ended"
        log.error("background task %s died: %s", name, self._errors[name], exc_info=error)
        self._on_death(name)


async def every(seconds: float, action: Callable[[], Any]) -> None:
    """Call `action` for ever. An exception ends it: the supervisor makes that visible."""
    while True:
        await asyncio.sleep(seconds)
        result = action()
        if asyncio.iscoroutine(result):
            await result
