"""Every error of kvwire: one class per reason of `kvwire.v1.ErrorReason`, in one table.

The classes know neither gRPC nor protobuf. `code` names the gRPC status code that the reason travels under;
`kvwire.client.status` turns an error into a `google.rpc.Status` and back. `metadata` holds every dynamic
part of the text, so that a program never has to parse it.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = ["ERRORS", "KvwireError", "error_for_reason"]


class KvwireError(Exception):
    """Base of all errors. `str(error)` is a sentence that tells the operator what happened and what to do."""

    reason: ClassVar[str] = "INTERNAL"
    code: ClassVar[str] = "INTERNAL"
    retriable: ClassVar[bool] = False

    def __init__(self, message: str, /, **metadata: object) -> None:
        super().__init__(message)
        self.metadata: dict[str, str] = {name: str(value) for name, value in metadata.items()}


class Internal(KvwireError):
    """The server has a fault of its own. The text never holds a stack trace or a memory address."""


class InvalidArgument(KvwireError):
    """A request field has a value outside its contract. Metadata `field` names it."""

    reason = "INVALID_FIELD"
    code = "INVALID_ARGUMENT"

    def __init__(self, field: str, description: str, /, **metadata: object) -> None:
        super().__init__(f"{field}: {description}", field=field, description=description, **metadata)


class TokensInvalid(KvwireError):
    """Token ids are not packed little-endian uint32, or one is outside uint32."""

    reason = "TOKENS_INVALID"
    code = "INVALID_ARGUMENT"


class RangeInvalid(KvwireError):
    """A chunk, slot or block range reaches outside what it refers to."""

    reason = "RANGE_INVALID"
    code = "OUT_OF_RANGE"


class TooManyItems(KvwireError):
    """A call carries more items or keys than the stated limit. Metadata `actual`, `allowed`."""

    reason = "TOO_MANY_ITEMS"
    code = "RESOURCE_EXHAUSTED"


class MessageTooLarge(KvwireError):
    """A message is larger than the stated limit. Metadata `actual`, `allowed`."""

    reason = "MESSAGE_TOO_LARGE"
    code = "RESOURCE_EXHAUSTED"


class AlignmentInvalid(KvwireError):
    """The required alignment is 0, or no cacheable KV group is left."""

    reason = "ALIGNMENT_INVALID"
    code = "INVALID_ARGUMENT"


class AlignmentTooLarge(KvwireError):
    """The resulting chunk size exceeds the server's --max-chunk-size."""

    reason = "ALIGNMENT_TOO_LARGE"
    code = "INVALID_ARGUMENT"


class ChunkSizeNotNegotiated(KvwireError):
    """A cache operation came before NegotiateChunkSize."""

    reason = "CHUNK_SIZE_NOT_NEGOTIATED"
    code = "FAILED_PRECONDITION"


class ChunkSizeIncompatible(KvwireError):
    """The bound chunk size is no multiple of the caller's alignment. Metadata: size, alignment, binder."""

    reason = "CHUNK_SIZE_INCOMPATIBLE"
    code = "FAILED_PRECONDITION"


class BindingIncomplete(KvwireError):
    """A part of the server has not taken over the chunk size yet: repeat the call with the same alignment."""

    reason = "BINDING_INCOMPLETE"
    code = "FAILED_PRECONDITION"
    retriable = True


class ResizeRefused(KvwireError):
    """Sessions have started: the chunk size of this server can never change again."""

    reason = "RESIZE_REFUSED"
    code = "FAILED_PRECONDITION"


class DigestUnsupported(KvwireError):
    """The client and the server have no digest function in common."""

    reason = "DIGEST_UNSUPPORTED"
    code = "FAILED_PRECONDITION"


class VersionUnsupported(KvwireError):
    """The client and the server have no protocol version in common."""

    reason = "VERSION_UNSUPPORTED"
    code = "FAILED_PRECONDITION"


class NotRegistered(KvwireError):
    """The registration is unknown to this incarnation of the server: negotiate and register again."""

    reason = "NOT_REGISTERED"
    code = "FAILED_PRECONDITION"


class LayoutConflict(KvwireError):
    """Another engine that is still registered uses the same namespace with another KV layout."""

    reason = "LAYOUT_CONFLICT"
    code = "FAILED_PRECONDITION"


class LayoutUnsupported(KvwireError):
    """The KV layout cannot be cached. The text says which part and why."""

    reason = "LAYOUT_UNSUPPORTED"
    code = "INVALID_ARGUMENT"


class DataPathUnavailable(KvwireError):
    """None of the offered data paths works between this client and this server."""

    reason = "DATA_PATH_UNAVAILABLE"
    code = "FAILED_PRECONDITION"


class SessionUnknown(KvwireError):
    """The session does not exist: it ended, expired, or the server restarted. Look the prompt up again."""

    reason = "SESSION_UNKNOWN"
    code = "NOT_FOUND"


class LeaseUnknown(KvwireError):
    """The lease never existed in this incarnation, or belongs to somebody else."""

    reason = "LEASE_UNKNOWN"
    code = "NOT_FOUND"


class LeaseLost(KvwireError):
    """The lease ended before the operation: nothing was published, and what was read must not be used."""

    reason = "LEASE_LOST"
    code = "ABORTED"


class ObjectNotFound(KvwireError):
    """An object that was asked for is not resident (any more)."""

    reason = "OBJECT_NOT_FOUND"
    code = "NOT_FOUND"


class OutOfSpace(KvwireError):
    """No memory: larger than the pool, or all else is pinned. Metadata `needed`, `capacity`."""

    reason = "OUT_OF_SPACE"
    code = "RESOURCE_EXHAUSTED"


class Overloaded(KvwireError):
    """The server has as many calls in flight as it allows. Repeat after the delay in RetryInfo."""

    reason = "OVERLOADED"
    code = "RESOURCE_EXHAUSTED"
    retriable = True


class TooManySessions(KvwireError):
    """The server has as many sessions or registrations as it allows."""

    reason = "TOO_MANY_SESSIONS"
    code = "RESOURCE_EXHAUSTED"


class Draining(KvwireError):
    """The server is shutting down and takes no new work."""

    reason = "DRAINING"
    code = "UNAVAILABLE"
    retriable = True


class Unavailable(KvwireError):
    """The server cannot be reached."""

    reason = "SERVER_UNAVAILABLE"
    code = "UNAVAILABLE"
    retriable = True


class DeadlineExceeded(KvwireError):
    """The call did not end within its deadline."""

    reason = "DEADLINE_EXCEEDED"
    code = "DEADLINE_EXCEEDED"
    retriable = True


class TransferFailed(KvwireError):
    """The data path could not move the bytes of an object, or moved another length than agreed."""

    reason = "TRANSFER_FAILED"
    code = "ABORTED"


class TransferTimeout(KvwireError):
    """The data path did not move the bytes within the deadline."""

    reason = "TRANSFER_TIMEOUT"
    code = "DEADLINE_EXCEEDED"


class ChecksumMismatch(KvwireError):
    """Bytes that crossed a process, a host or a disk do not match the checksum of their object."""

    reason = "CHECKSUM_MISMATCH"
    code = "DATA_LOSS"


class Unauthenticated(KvwireError):
    """The bearer token is missing or wrong."""

    reason = "TOKEN_INVALID"
    code = "UNAUTHENTICATED"


class NotImplementedYet(KvwireError):
    """The method is part of the contract and not served by this program."""

    reason = "NOT_SERVED"
    code = "UNIMPLEMENTED"


class ServerNotRegistered(KvwireError):
    """The cache server is unknown to the coordinator: register again."""

    reason = "SERVER_NOT_REGISTERED"
    code = "FAILED_PRECONDITION"


class IncarnationStale(KvwireError):
    """The message comes from, or is meant for, an earlier run of a process."""

    reason = "INCARNATION_STALE"
    code = "FAILED_PRECONDITION"


class FleetMixed(KvwireError):
    """The cache server's chunk size or digest function differs from the fleet's."""

    reason = "FLEET_MIXED"
    code = "FAILED_PRECONDITION"


class StateUnavailable(KvwireError):
    """Nothing can be persisted: no state folder, or it cannot be written. Metadata `folder`, `cause`."""

    reason = "STATE_UNAVAILABLE"
    code = "FAILED_PRECONDITION"


class ConfigError(KvwireError):
    """A setting has a value that does not work. The text names the setting. Never crosses the wire."""

    reason = "CONFIG_INVALID"
    code = "INVALID_ARGUMENT"


class MissingExtra(KvwireError):
    """An optional part is not installed. The text names the extra. Never crosses the wire."""

    reason = "EXTRA_MISSING"
    code = "FAILED_PRECONDITION"

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs an optional part: pip install 'kvwire[{extra}]'", feature=feature, extra=extra
        )


def _all_errors() -> dict[str, type[KvwireError]]:
    table: dict[str, type[KvwireError]] = {}
    for cls in KvwireError.__subclasses__():
        if cls.reason in table:
            raise RuntimeError(f"two errors share the reason {cls.reason}")
        table[cls.reason] = cls
    return table


ERRORS: dict[str, type[KvwireError]] = _all_errors()
"""Reason -> class, for every reason of the contract (and the two that never cross the wire)."""


def error_for_reason(reason: str, message: str, metadata: dict[str, str]) -> KvwireError | None:
    """The typed error for a reason from the wire, or None for one that this version does not know."""
    cls = ERRORS.get(reason)
    if cls is None:
        return None
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.metadata = dict(metadata)
    return error
