from __future__ import annotations


class IdleWatch:
    """Whether a server has been without clients for `seconds`, from its start on."""

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self._since = now

    def is_over(self, clients: int, now: float) -> bool:
        if clients:
            self._since = now
        return now - self._since >= self._seconds
