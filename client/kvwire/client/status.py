"""Errors on the wire: `KvwireError` to `google.rpc.Status` and back. The server uses it too."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from kvwire.errors import (
    DeadlineExceeded,
    Internal,
    KvwireError,
    MessageTooLarge,
    NotImplementedYet,
    Overloaded,
    Unauthenticated,
    Unavailable,
    error_for_reason,
)
from kvwire.v1 import error_reason_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message

DOMAIN: Final = "kvwire"
DETAILS_KEY: Final = "grpc-status-details-bin"
RETRY_DELAY_S: Final = 0.1
"""What RetryInfo says when an error has no delay of its own (metadata `retry_delay_seconds`)."""

_PREFIX = "ERROR_REASON_"
_RETRY_DELAY = "retry_delay_seconds"
_PRECONDITIONS = frozenset({"CHUNK_SIZE_NOT_NEGOTIATED", "CHUNK_SIZE_INCOMPATIBLE"})
# gRPC allows 8 KiB of trailers in all; an error must never be lost because its text is long.
_MAX_MESSAGE = 1024
_MAX_METADATA = 2048
_SIZES = re.compile(r"larger than max \((\d+) vs\. (\d+)\)")


class RpcStatus(
    NamedTuple("RpcStatus", [("code", grpc.StatusCode), ("details", str), ("trailing_metadata", tuple)]),  # type: ignore[type-arg]
    grpc.Status,
):
    """What `context.abort_with_status` takes."""


def rpc_status(error: KvwireError) -> RpcStatus:
    status = to_status(error)
    trailing = ((DETAILS_KEY, status.SerializeToString()),)
    return RpcStatus(grpc.StatusCode[error.code], status.message, trailing)


def to_status(error: KvwireError) -> status_pb2.Status:
    """The `google.rpc.Status` of an error: one ErrorInfo, and the details that its reason adds."""
    message = _cut(str(error), _MAX_MESSAGE)
    code: int = grpc.StatusCode[error.code].value[0]
    details = [_packed(detail) for detail in _details(error, message)]
    return status_pb2.Status(code=code, message=message, details=details)


def from_status(status: status_pb2.Status) -> KvwireError | None:
    """The typed error, or None when the status is not one of kvwire's."""
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    delay = None
    found = False
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR) and not found:
            detail.Unpack(info)
            found = info.domain == DOMAIN
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            delay = retry.retry_delay.ToTimedelta().total_seconds()
    if not found:
        return None
    metadata = dict(info.metadata)
    if delay is not None:
        metadata.setdefault(_RETRY_DELAY, str(delay))
    return _typed(info.reason, status.message, metadata)


def retry_delay(error: KvwireError) -> float:
    """How long a caller waits before it repeats, in seconds."""
    try:
        return float(error.metadata.get(_RETRY_DELAY, RETRY_DELAY_S))
    except ValueError:
        return RETRY_DELAY_S


def from_rpc_error(exc: grpc.RpcError, *, address: str, method: str, seconds: float | None) -> KvwireError:
    """The typed error of a failed call. `method` is the RPC's name, `seconds` its deadline."""
    if not isinstance(exc, grpc.Call | grpc.aio.AioRpcError):
        return Internal(f"{method} at {address} failed: {exc}", method=method, address=address)
    for key, value in exc.trailing_metadata() or ():
        if key == DETAILS_KEY:
            error = _parsed(value)
            if error is not None:
                return error
    text = exc.details() or ""
    build = _BY_CODE.get(exc.code(), _other)
    return build(_Failure(exc.code(), text, address, method, seconds))


def stuck(address: str, method: str, seconds: float) -> KvwireError:
    """The error of a call that gRPC does not end although its time is over."""
    return _deadline(_Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "", address, method, seconds))


def item_error(message: error_reason_pb2.ItemError) -> KvwireError:
    """The typed error of one item of a batch."""
    try:
        reason = error_reason_pb2.ErrorReason.Name(message.reason).removeprefix(_PREFIX)
    except ValueError:
        reason = str(message.reason)
    return _typed(reason, message.message, dict(message.metadata))


def to_item_error(error: KvwireError) -> error_reason_pb2.ItemError:
    try:
        reason = error_reason_pb2.ErrorReason.Value(_PREFIX + error.reason)
    except ValueError:
        reason = error_reason_pb2.ERROR_REASON_INTERNAL
    metadata = _bounded(error.metadata)
    return error_reason_pb2.ItemError(
        reason=reason, message=_cut(str(error), _MAX_MESSAGE), metadata=metadata
    )


def _typed(reason: str, message: str, metadata: dict[str, str]) -> KvwireError:
    error = error_for_reason(reason, message, metadata)
    if error is not None:
        return error
    # A newer server has reasons that this version does not know; its sentence still helps.
    return KvwireError(
        message or f"The server answered with {reason}.", **{**metadata, "unknown_reason": reason}
    )


def _details(error: KvwireError, message: str) -> list[Message]:
    metadata = _bounded(error.metadata)
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    ]
    if error.reason == "INVALID_FIELD":
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=metadata.get("field", ""), description=metadata.get("description", "")
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    elif error.reason in _PRECONDITIONS:
        failure = error_details_pb2.PreconditionFailure.Violation(
            type=error.reason, subject="chunk_size", description=message
        )
        details.append(error_details_pb2.PreconditionFailure(violations=[failure]))
    elif error.reason == "OVERLOADED":
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(retry_delay(error) * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _bounded(metadata: dict[str, str]) -> dict[str, str]:
    room = _MAX_METADATA
    kept: dict[str, str] = {}
    for name, value in metadata.items():
        if len(name) > room:
            break
        kept[name] = _cut(value, room - len(name))
        room -= len(name) + len(kept[name].encode())
    return kept


def _cut(text: str, limit: int) -> str:
    raw = text.encode("utf-8", "replace")
    if len(raw) <= limit:
        return raw.decode()
    return raw[: max(limit - 3, 0)].decode("utf-8", "ignore") + "..."


def _parsed(value: str | bytes) -> KvwireError | None:
    raw = value.encode("latin-1") if isinstance(value, str) else value
    try:
        return from_status(status_pb2.Status.FromString(raw))
    except Exception:  # noqa: BLE001 - another's bytes: whatever is wrong with them, the code is still good
        return None


class _Failure(NamedTuple):
    code: grpc.StatusCode
    text: str
    address: str
    method: str
    seconds: float | None


def _unavailable(failure: _Failure) -> KvwireError:
    return Unavailable(
        f"The kvwire server at {failure.address} cannot be reached ({failure.text or 'no connection'}): "
        "check that it runs and that the address is right.",
        address=failure.address,
        method=failure.method,
    )


def _deadline(failure: _Failure) -> KvwireError:
    limit = "its deadline" if failure.seconds is None else f"{failure.seconds:g} s"
    return DeadlineExceeded(
        f"{failure.method} at {failure.address} did not end within {limit}: "
        "the server is overloaded or hangs.",
        address=failure.address,
        method=failure.method,
        seconds="" if failure.seconds is None else f"{failure.seconds:g}",
    )


def _exhausted(failure: _Failure) -> KvwireError:
    sizes = _SIZES.search(failure.text)
    if sizes is not None:
        actual, allowed = sizes.groups()
        return MessageTooLarge(
            f"A message of {failure.method} has {actual} bytes, {allowed} are allowed: "
            "send less in one call.",
            method=failure.method,
            actual=actual,
            allowed=allowed,
        )
    return Overloaded(
        f"The kvwire server at {failure.address} refused {failure.method}: {failure.text or 'overloaded'}.",
        address=failure.address,
        method=failure.method,
    )


def _unimplemented(failure: _Failure) -> KvwireError:
    return NotImplementedYet(
        f"The program at {failure.address} does not serve {failure.method}: "
        "it is another program or another version.",
        address=failure.address,
        method=failure.method,
    )


def _unauthenticated(failure: _Failure) -> KvwireError:
    return Unauthenticated(
        f"The kvwire server at {failure.address} wants a valid bearer token ({failure.text}).",
        address=failure.address,
    )


def _cancelled(failure: _Failure) -> KvwireError:
    return Unavailable(
        f"{failure.method} at {failure.address} was cancelled: {failure.text}.",
        address=failure.address,
        method=failure.method,
    )


def _other(failure: _Failure) -> KvwireError:
    return Internal(
        f"{failure.method} at {failure.address} failed with {failure.code.name}: {failure.text}",
        address=failure.address,
        method=failure.method,
        code=failure.code.name,
    )


_BY_CODE: Final[dict[grpc.StatusCode, Callable[[_Failure], KvwireError]]] = {
    grpc.StatusCode.UNAVAILABLE: _unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: _deadline,
    grpc.StatusCode.RESOURCE_EXHAUSTED: _exhausted,
    grpc.StatusCode.UNIMPLEMENTED: _unimplemented,
    grpc.StatusCode.UNAUTHENTICATED: _unauthenticated,
    grpc.StatusCode.CANCELLED: _cancelled,
}
