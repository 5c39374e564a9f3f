"""One table: reason <-> class <-> gRPC code, total in both directions, and each reason met in real life."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from kvwire.client.status import from_status, item_error, to_item_error, to_status
from kvwire.errors import ERRORS
from kvwire.server.binding import Binder
from kvwire.v1 import cache_service_pb2 as pb
from kvwire.v1 import error_reason_pb2, layout_pb2, transfer_pb2
from support.local_server import local_server
from support.raw_client import RawClient, content, failure, tokens

PROTO = Path(__file__).parents[2] / "proto/kvwire/v1/error_reason.proto"
PREFIX = "ERROR_REASON_"
LOCAL = {"CONFIG_INVALID", "EXTRA_MISSING"}
"""They never cross the wire."""
REASONS = {
    name.removeprefix(PREFIX)
    for name in error_reason_pb2.ErrorReason.DESCRIPTOR.values_by_name
    if name != f"{PREFIX}UNSPECIFIED"
}
ELSEWHERE = {
    "SERVER_UNAVAILABLE": "set by clients: nobody answers",
    "DEADLINE_EXCEEDED": "set by clients: no answer in time",
    "MESSAGE_TOO_LARGE": "set by clients, from what gRPC itself says: test_bad_input",
    "OBJECT_NOT_FOUND": "set by clients: the server names missing objects in its reply",
    "DRAINING": "test_server_stop",
    "OVERLOADED": "test_limits",
    "TOKEN_INVALID": "test_security",
    "TRANSFER_TIMEOUT": "UCX alone has to wait for bytes: the tests of the data paths",
    "SERVER_NOT_REGISTERED": "of the coordinator, which this program is not",
    "INCARNATION_STALE": "test_peer_calls",
    "FLEET_MIXED": "test_peer_calls",
    "STATE_UNAVAILABLE": "test_pinning",
}


def comments():
    """(reason, gRPC code, metadata that is always there) as the schema says."""
    for comment, name in re.findall(r"((?:  //.*\n)+)  ERROR_REASON_(\w+) = \d+;", PROTO.read_text()):
        text = " ".join(line.strip(" /") for line in comment.splitlines())
        code = re.search(r"\(([A-Z_]+)\)", text)
        told = re.search(r"Metadata: ([a-z_, ]+)[.;]", text)
        keys = set(re.findall(r"\w+", told.group(1))) if told and " or " not in told.group(1) else set()
        yield name, code.group(1) if code else "", keys - {"and"}


COMMENTS = {name: (code, keys) for name, code, keys in comments() if name != "UNSPECIFIED"}


def test_every_reason_has_a_class_and_every_class_a_reason():
    assert set(ERRORS) - LOCAL == REASONS
    assert {cls.reason for cls in ERRORS.values()} == set(ERRORS)
    assert set(COMMENTS) == REASONS


def test_the_codes_are_those_that_the_schema_states():
    for reason, (code, _keys) in COMMENTS.items():
        assert ERRORS[reason].code == code, reason
        assert code in grpc.StatusCode.__members__


@pytest.mark.parametrize("reason", sorted(REASONS))
def test_an_error_comes_through_the_wire_as_it_was(reason):
    error = ERRORS[reason].__new__(ERRORS[reason])
    Exception.__init__(error, "What happened.")
    error.metadata = {"field": "f", "description": "d", "a": "1"}
    for back in (from_status(to_status(error)), item_error(to_item_error(error))):
        assert type(back) is ERRORS[reason]
        assert str(back) == "What happened."
        assert error.metadata.items() <= back.metadata.items()


def call_error(call, *args, **kwargs):
    failed = failure(call, *args, **kwargs)
    assert failed.code.name == ERRORS[failed.reason].code
    return failed.reason, failed.metadata


def of_item(error):
    reason = error_reason_pb2.ErrorReason.Name(error.reason).removeprefix(PREFIX)
    return reason, dict(error.metadata)


class Scenarios:
    """One method per reason; each returns (reason, metadata) as a client saw them."""

    def __init__(self, local):
        self.local = local
        self.fresh = RawClient(local.channel(), "fresh")

    @property
    def client(self):
        return RawClient(self.local.channel(), "engine").register("inline")

    def internal(self):
        def broken(*_):
            raise ZeroDivisionError

        self.local.engine.ping = broken
        return call_error(self.client.ping)

    def invalid_field(self):
        return call_error(self.client.lookup, "", tokens(1))

    def tokens_invalid(self):
        return call_error(self.client.lookup, "s", b"123")

    def range_invalid(self):
        client = self.client
        client.lookup("s", tokens(2))
        return of_item(client.begin_store("s", 1, 2).error)

    def too_many_items(self):
        return call_error(self.client.end_session, *["s"] * 1025)

    def alignment_invalid(self):
        return call_error(self.fresh.negotiate, 0)

    def alignment_too_large(self):
        return call_error(self.fresh.negotiate, 65_537)

    def chunk_size_not_negotiated(self):
        return call_error(self.fresh.lookup, "s", tokens(1))

    def chunk_size_incompatible(self):
        self.fresh.negotiate(4)
        return call_error(self.fresh.negotiate, 3)

    def binding_incomplete(self):
        break_binder(self.local)
        return call_error(self.fresh.negotiate, 4)

    def resize_refused(self):
        break_binder(self.local)
        failure(self.fresh.negotiate, 4)
        self.local.run(self.local.core.binding.session_started)
        return call_error(self.fresh.negotiate, 16)

    def digest_unsupported(self):
        request = pb.NegotiateChunkSizeRequest(required_alignment=1, digest_functions=[9])
        return call_error(self.fresh.stub.NegotiateChunkSize, request)

    def version_unsupported(self):
        request = pb.NegotiateChunkSizeRequest(required_alignment=1, protocol_versions=[99])
        return call_error(self.fresh.stub.NegotiateChunkSize, request)

    def not_registered(self):
        self.fresh.registration_id = 12
        return call_error(self.fresh.end_session, "s")

    def layout_conflict(self):
        assert self.client.ping()
        return call_error(RawClient(self.local.channel(), "b").register, object_bytes=1)

    def layout_unsupported(self):
        self.fresh.negotiate()
        layout = layout_pb2.KvLayout(world_size=0, groups=[layout_pb2.KvGroup(kind=1)])
        return call_error(self.fresh.register, layout=layout)

    def data_path_unavailable(self):
        self.fresh.negotiate()
        offer = transfer_pb2.DataPathOffer(path=transfer_pb2.DATA_PATH_SHM, host_id="elsewhere")
        return call_error(self.fresh.register, offers=[offer])

    def session_unknown(self):
        return of_item(self.client.begin_store("nobody", 0, 1).error)

    def lease_unknown(self):
        return of_item(self.client.commit(77).error)

    def lease_lost(self):
        client = self.client
        client.lookup("s", tokens(1))
        lease_id = client.begin_store("s", 0, 1).ticket.lease_id
        assert client.abort(lease_id) == 1
        return of_item(client.commit(lease_id).error)

    def out_of_space(self):
        client = RawClient(self.local.channel(), "large").register("inline", object_bytes=1 << 30)
        client.lookup("s", tokens(1))
        return of_item(client.begin_store("s", 0, 1).error)

    def too_many_sessions(self):
        client = self.client
        client.lookup("s", tokens(1))
        return call_error(client.lookup, "t", tokens(1))

    def transfer_failed(self):
        client = self.client
        client.lookup("s", tokens(1))
        return of_item(client.commit(client.begin_store("s", 0, 1).ticket.lease_id).error)

    def checksum_mismatch(self):
        client = self.client
        client.lookup("s", tokens(1))
        ticket = client.begin_store("s", 0, 1).ticket
        client.write(ticket, [content(b"right")])
        result = client.commit(ticket.lease_id, [0], [bytes(16)])
        assert (result.committed, result.aborted, list(result.failed_slots)) == (0, 1, [0])
        assert client.hits(tokens(1)) == 0
        return of_item(result.error)

    def not_served(self):
        return call_error(self.fresh.stub.MatchBlend, pb.CacheServiceMatchBlendRequest())


def break_binder(local):
    def broken(_size):
        raise RuntimeError("a test says so")

    binding = local.core.binding
    binding._binders = (*binding._binders[:1], Binder("broken", broken), *binding._binders[1:])


MET = {name for name in vars(Scenarios) if name.upper() in REASONS}


def test_every_reason_is_met_here_or_elsewhere():
    assert {name.upper() for name in MET} | set(ELSEWHERE) == REASONS
    assert not {name.upper() for name in MET} & set(ELSEWHERE)


@pytest.mark.parametrize("name", sorted(MET))
def test_the_reason_is_met_with_the_metadata_that_the_schema_promises(short_tmp, name):
    with local_server(short_tmp, max_sessions=1) as local:
        reason, metadata = getattr(Scenarios(local), name)()
        assert reason == name.upper()
        assert COMMENTS[reason][1] <= set(metadata)
        assert all(metadata.values())


def test_bl04_a_binder_that_fails_once(short_tmp):
    """No size is in force before every part has taken it over, and never two at once."""
    with local_server(short_tmp) as local:
        client = RawClient(local.channel())
        failures = iter([True, False])
        bound = []

        def once(size):
            if next(failures):
                raise RuntimeError("not now")
            bound.append(size)

        binding = local.core.binding
        binding._binders = (*binding._binders[:1], Binder("moody", once), *binding._binders[1:])
        assert failure(client.negotiate, 48).reason == "BINDING_INCOMPLETE"
        client.chunk_size = 48
        for call in (lambda: client.lookup("s", tokens(48)), lambda: client.register("inline")):
            assert failure(call).reason == "CHUNK_SIZE_NOT_NEGOTIATED"
        status = client.status().chunk_size
        assert status.chunk_size == 0
        assert [binder.bound for binder in status.binders] == [True, *[False] * 5]
        assert client.ping().chunk_size == 0
        assert failure(client.negotiate, 32).reason == "BINDING_INCOMPLETE"
        assert client.negotiate(48) == 48
        assert bound == [48]
        assert all(binder.bound for binder in client.status().chunk_size.binders)
        assert client.negotiate(16) == client.negotiate(48) == 48
        client.register("inline")
        client.lookup("s", tokens(1, chunk_size=48))
        assert client.negotiate(48) == 48
        assert failure(client.negotiate, 32).reason == "CHUNK_SIZE_INCOMPATIBLE"
        client.end_session("s")
        assert failure(client.negotiate, 32).reason == "CHUNK_SIZE_INCOMPATIBLE"


def test_bl04_concurrent_callers_get_one_size(local):
    def ask(alignment):
        client = RawClient(local.channel())
        try:
            return client.negotiate(alignment)
        except grpc.RpcError as error:
            return error.code().name

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, [48, 32, 48, 16, 48, 32, 16, 48]))
    sizes = {answer for answer in answers if isinstance(answer, int)}
    assert len(sizes) == 1
    assert set(answers) - sizes <= {"FAILED_PRECONDITION"}
