"""What the servicers of both programs do with a request: convert, check, refuse."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from google.protobuf.duration_pb2 import Duration

from kvwire.errors import NotImplementedYet, TooManyItems
from kvwire.keys import Namespace
from kvwire.v1 import namespace_pb2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def namespace(message: namespace_pb2.Namespace) -> Namespace:
    """Raises InvalidArgument. The same few come again and again: legal ones are remembered."""
    return _namespace(message.SerializeToString(deterministic=True))


@lru_cache(maxsize=1024)
def _namespace(raw: bytes) -> Namespace:
    message = namespace_pb2.Namespace.FromString(raw)
    found = Namespace(
        model=message.model,
        revision=message.revision,
        kv_dtype=message.kv_dtype,
        layout_fingerprint=message.layout_fingerprint,
        adapter=message.adapter,
        adapter_revision=message.adapter_revision,
        salt=message.salt,
    )
    found.validate()
    return found


def duration(seconds: float) -> Duration:
    """0 for a negative one."""
    nanos = max(0, round(seconds * 1e9))
    return Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def check_count(what: str, actual: int, allowed: int) -> None:
    """Raises TooManyItems."""
    if actual > allowed:
        raise TooManyItems(
            f"{what}: {actual} in one call, {allowed} are allowed. Split the call.",
            field=what,
            actual=actual,
            allowed=allowed,
        )


def refusing(method: str, text: str) -> Callable[[Any, Any, Any], Awaitable[Any]]:
    """Stands where a method of the contract would, for one that a program does not serve."""

    async def answer(_self: Any, _request: Any, _context: Any) -> NoReturn:
        raise NotImplementedYet(text, method=method)

    return answer
