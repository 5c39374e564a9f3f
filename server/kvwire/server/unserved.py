"""Methods of the contract that this program does not serve (yet): they say so, with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvwire.serving.requests import refusing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def not_served(method: str) -> Callable[[Any, Any, Any], Awaitable[Any]]:
    return refusing(method, f"This server does not serve {method}.")
