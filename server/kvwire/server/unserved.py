"""Methods of the contract that this program does not serve (yet): they say so, with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from kvwire.errors import NotImplementedYet

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def not_served(method: str) -> Callable[[Any, Any, Any], Awaitable[Any]]:
    async def answer(_self: Any, _request: Any, _context: Any) -> NoReturn:
        raise _error(method)

    return answer


def _error(method: str) -> NotImplementedYet:
    return NotImplementedYet(f"This server does not serve {method}.", method=method)
