from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from kvwire import errors
from kvwire.client import status
from kvwire.errors import ERRORS, KvwireError
from kvwire.v1 import error_reason_pb2

LOCAL_ONLY = {"CONFIG_INVALID", "EXTRA_MISSING"}
WIRE = sorted(set(ERRORS) - LOCAL_ONLY)


def build(reason: str, **metadata: str) -> KvwireError:
    error = errors.error_for_reason(
        reason, f"The text of {reason}.", {name: str(v) for name, v in metadata.items()}
    )
    assert error is not None
    return error


class Failed(grpc.RpcError, grpc.Call):
    """What a synchronous call raises."""

    def __init__(self, code, details="", trailing=()):
        self._code, self._details, self._trailing = code, details, trailing

    def code(self):
        return self._code

    def details(self):
        return self._details

    def trailing_metadata(self):
        return self._trailing

    def _unused(self, *_args):
        raise NotImplementedError

    initial_metadata = is_active = time_remaining = cancel = add_callback = _unused


def read(exc) -> KvwireError:
    return status.from_rpc_error(exc, address="127.0.0.1:7470", method="Lookup", seconds=5.0)


def test_reasons_of_the_schema_and_the_classes_are_the_same_set():
    schema = {name.removeprefix("ERROR_REASON_") for name in error_reason_pb2.ErrorReason.keys()}  # noqa: SIM118
    assert schema - {"UNSPECIFIED"} == set(WIRE)


@pytest.mark.parametrize("reason", WIRE)
def test_every_error_comes_back_as_what_it_was(reason):
    sent = build(reason, field="tokens", description="odd", bound_size="256")
    rpc = status.rpc_status(sent)
    assert rpc.code.name == sent.code
    got = read(Failed(rpc.code, rpc.details, rpc.trailing_metadata))
    assert type(got) is type(sent)
    assert str(got) == str(sent)
    assert {**sent.metadata, **got.metadata} == got.metadata


@pytest.mark.parametrize("reason", WIRE)
def test_every_error_comes_back_from_an_item(reason):
    sent = build(reason, chunk="3", group="0")
    got = status.item_error(status.to_item_error(sent))
    assert (type(got), str(got), got.metadata) == (type(sent), str(sent), sent.metadata)


def details_of(error: KvwireError) -> dict[str, object]:
    found = {}
    for packed in status.to_status(error).details:
        message = getattr(error_details_pb2, packed.type_url.rpartition(".")[2])()
        assert packed.Unpack(message)
        found[type(message).__name__] = message
    return found


def test_a_status_has_exactly_one_error_info():
    details = details_of(build("LEASE_LOST", lease_id="7"))
    assert set(details) == {"ErrorInfo"}
    assert details["ErrorInfo"].domain == "kvwire"
    assert details["ErrorInfo"].reason == "LEASE_LOST"
    assert dict(details["ErrorInfo"].metadata) == {"lease_id": "7"}


def test_an_invalid_field_is_named_in_a_bad_request():
    details = details_of(errors.InvalidArgument("kv_rank", "is not below world_size"))
    violation = details["BadRequest"].field_violations[0]
    assert (violation.field, violation.description) == ("kv_rank", "is not below world_size")


@pytest.mark.parametrize("reason", ["CHUNK_SIZE_NOT_NEGOTIATED", "CHUNK_SIZE_INCOMPATIBLE"])
def test_a_chunk_size_conflict_is_a_precondition_failure(reason):
    violation = details_of(build(reason))["PreconditionFailure"].violations[0]
    assert (violation.type, violation.subject) == (reason, "chunk_size")


def test_overload_tells_when_to_come_back():
    error = errors.Overloaded("Too much.", retry_delay_seconds=0.25)
    assert details_of(error)["RetryInfo"].retry_delay.ToTimedelta().total_seconds() == 0.25
    rpc = status.rpc_status(errors.Overloaded("Too much."))
    got = read(Failed(rpc.code, rpc.details, rpc.trailing_metadata))
    assert status.retry_delay(got) == status.RETRY_DELAY_S


def test_long_errors_stay_within_what_trailers_can_carry():
    error = build("DATA_PATH_UNAVAILABLE", **{f"path_{i}": "x" * 5000 for i in range(20)})
    error.args = ("äöü" * 5000,)
    rpc = status.rpc_status(error)
    assert len(rpc.details.encode()) + len(rpc.trailing_metadata[0][1]) < 7000
    got = read(Failed(rpc.code, rpc.details, rpc.trailing_metadata))
    assert isinstance(got, errors.DataPathUnavailable)
    assert "path_0" in got.metadata


@pytest.mark.parametrize(
    ("code", "details", "wanted"),
    [
        ("UNAVAILABLE", "connection refused", errors.Unavailable),
        ("DEADLINE_EXCEEDED", "", errors.DeadlineExceeded),
        ("UNIMPLEMENTED", "Method not found!", errors.NotImplementedYet),
        ("UNAUTHENTICATED", "", errors.Unauthenticated),
        ("RESOURCE_EXHAUSTED", "Concurrent RPC limit exceeded!", errors.Overloaded),
        ("CANCELLED", "Channel closed!", errors.Unavailable),
        ("UNKNOWN", "Unexpected <class 'KeyError'>", errors.Internal),
        ("INTERNAL", "", errors.Internal),
    ],
)
def test_a_status_without_details_is_told_by_its_code(code, details, wanted):
    assert type(read(Failed(grpc.StatusCode[code], details))) is wanted


def test_what_the_caller_needs_is_in_the_sentence():
    assert "127.0.0.1:7470" in str(read(Failed(grpc.StatusCode.UNAVAILABLE, "refused")))
    late = read(Failed(grpc.StatusCode.DEADLINE_EXCEEDED))
    assert "5 s" in str(late)
    assert late.metadata["method"] == "Lookup"


def test_bl59_grpc_text_on_sizes_becomes_numbers():
    text = "CLIENT: Sent message larger than max (16777230 vs. 16777216)"
    error = read(Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, text))
    assert isinstance(error, errors.MessageTooLarge)
    assert (error.metadata["actual"], error.metadata["allowed"]) == ("16777230", "16777216")


def test_bl64_a_reason_of_a_newer_server_keeps_its_sentence():
    info = error_details_pb2.ErrorInfo(reason="FROM_THE_FUTURE", domain="kvwire", metadata={"a": "b"})
    raw = status_pb2.Status(code=9, message="Update the client.")
    raw.details.add().Pack(info)
    error = read(
        Failed(grpc.StatusCode.FAILED_PRECONDITION, "", ((status.DETAILS_KEY, raw.SerializeToString()),))
    )
    assert type(error) is KvwireError
    assert str(error) == "Update the client."
    assert error.metadata["unknown_reason"] == "FROM_THE_FUTURE"
    item = error_reason_pb2.ItemError(message="Newer.")
    item.MergeFromString(b"\x08\xe7\x07")  # reason 999
    assert str(status.item_error(item)) == "Newer."


def test_details_of_another_domain_or_garbage_do_not_hide_the_code():
    other = status_pb2.Status(code=14, message="theirs")
    other.details.add().Pack(error_details_pb2.ErrorInfo(reason="LEASE_LOST", domain="example.com"))
    for raw in (other.SerializeToString(), b"\xff\xff\xff"):
        error = read(Failed(grpc.StatusCode.UNAVAILABLE, "gone", ((status.DETAILS_KEY, raw),)))
        assert type(error) is errors.Unavailable
