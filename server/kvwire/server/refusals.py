from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvwire.errors import KvwireError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEEP_S: Final = 600.0
MAX_REFUSALS: Final = 100


@dataclass(slots=True)
class Refusal:
    """Why a client was turned away the last time, and how often it was. `last` is on the server's clock."""

    client_name: str
    reason: str
    message: str
    times: int
    last: float


class Refusals:
    """Clients that could not negotiate or register, until they can: what operators see of an engine that runs
    without its cache. Clients are told apart by their names alone, as people tell them apart."""

    def __init__(self, now: Callable[[], float], keep: float = KEEP_S, limit: int = MAX_REFUSALS) -> None:
        self._now = now
        self._keep = keep
        self._limit = limit
        self._by_name: dict[str, Refusal] = {}

    @contextmanager
    def noting(self, client_name: str) -> Iterator[None]:
        """Note what a client's call fails with."""
        try:
            yield
        except KvwireError as error:
            self.note(client_name, error)
            raise

    def note(self, client_name: str, error: KvwireError) -> None:
        before = self._by_name.pop(client_name, None)
        times = before.times + 1 if before else 1
        self._by_name[client_name] = Refusal(client_name, error.reason, str(error), times, self._now())
        while len(self._by_name) > self._limit:
            del self._by_name[next(iter(self._by_name))]

    def forget(self, client_name: str) -> None:
        """It is registered now."""
        self._by_name.pop(client_name, None)

    def recent(self) -> list[Refusal]:
        """The latest last."""
        oldest = self._now() - self._keep
        self._by_name = {name: each for name, each in self._by_name.items() if each.last >= oldest}
        return list(self._by_name.values())
