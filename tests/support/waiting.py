"""Waiting for something that another process or thread brings about."""

from __future__ import annotations

import time


def eventually(condition, within: float = 10.0, every: float = 0.02):
    """The first true value of `condition()`; AssertionError when it does not come in time."""
    deadline = time.monotonic() + within
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{condition} is {value!r} after {within} s"
        time.sleep(every)
