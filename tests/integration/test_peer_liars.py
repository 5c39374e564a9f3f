"""A server whose answers cannot be right, are too large, or are followed by nothing."""

from __future__ import annotations

import contextlib
import importlib.util

import pytest

from kvwire.v1 import event_pb2
from kvwire.v1 import peer_service_pb2 as peer_pb
from support.fleet import fleet, untouched
from support.fleet_member import Member
from support.raw_client import OBJECT_BYTES, tokens
from support.waiting import eventually

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed")


class Liar(Member):
    """Says that it holds a prompt. `answer` makes its reply."""

    answer = None
    asked = 0
    released: list[int]

    def LookupAndLease(self, request, context):
        self.asked += 1
        return self.answer(request)

    def ReleaseLease(self, request, context):
        self.released = [*getattr(self, "released", []), *request.lease_ids]
        return peer_pb.ReleaseLeaseResponse(held=[True] * len(request.lease_ids))


def ticket(liar, request, **wrong):
    reply = peer_pb.LookupAndLeaseResponse(incarnation=liar.incarnation, hit_chunks=len(request.chunk_keys))
    offer = request.offers[0]
    reply.ticket.lease_id, reply.ticket.path, reply.ticket.piece_bytes = 7, offer.path, 4 << 20
    reply.ucx_address = offer.ucx_address
    for index in range(len(request.chunk_keys)):
        slot = {
            "chunk_index": index,
            "size_bytes": OBJECT_BYTES,
            "first_tag": 4 << 56 | request.transfer_id << 24 | index,
            "checksum": bytes(16),
        }
        reply.ticket.slots.add(**{**slot, **wrong})
    return reply


LIES = {
    "another size": {"size_bytes": OBJECT_BYTES // 2},
    "a huge size": {"size_bytes": 1 << 62},
    "a chunk that was not asked for": {"chunk_index": 1 << 20},
    "a rank that is none": {"kv_rank": 5},
    "a group that is none": {"group_index": 9},
    "tags of another transfer": {"first_tag": 4 << 56 | 1 << 24},
    "no checksum": {"checksum": b""},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_ticket_that_cannot_be_right_moves_nothing(short_tmp, lie):
    with fleet(short_tmp, "b", data_paths=("shm", "ucx-local")) as made, lying(made) as (liar, prompt):
        liar.answer = lambda request: ticket(liar, request, **LIES[lie])
        assert made.client("b").lookup("r", prompt).hit_chunks == 0
        assert "cannot be right" in made.peer("b", "liar").problem
        eventually(lambda: getattr(liar, "released", None) == [7])
        made.client("b").lookup("again", prompt)
        assert liar.asked == 1
        assert untouched(made.servers["b"])


def test_a_reply_that_is_too_large_moves_nothing(short_tmp):
    with fleet(short_tmp, "b", data_paths=("shm", "ucx-local")) as made, lying(made) as (liar, prompt):
        liar.answer = lambda _: peer_pb.LookupAndLeaseResponse(ucx_address=bytes(17 << 20))
        assert made.client("b").lookup("r", prompt).hit_chunks == 0
        assert untouched(made.servers["b"])


def test_a_peer_of_which_no_byte_comes_is_given_up(short_tmp):
    with (
        fleet(
            short_tmp, "b", data_paths=("shm", "ucx-local"), prefetch_deadline=0.5, write_lease=1.0
        ) as made,
        lying(made) as (liar, prompt),
    ):
        liar.answer = lambda request: ticket(liar, request)
        assert made.client("b").lookup("r", prompt).hit_chunks == 0
        eventually(lambda: untouched(made.servers["b"]))
        made.check()


def event(key: bytes):
    return event_pb2.CacheEvent(kind=1, chunk_key=key, tier=1, backend="memory", size_bytes=OBJECT_BYTES)


@contextlib.contextmanager
def lying(made):
    """A member that says to hold a prompt of four chunks."""
    prompt = tokens(4, seed=77)
    with Liar(made.coordinator, "liar", made.folder, features=("peer",)) as liar:
        liar.held = [event(key) for key in made.client("b").keys(prompt)]
        liar.register()
        eventually(lambda: made.located(prompt).get("liar") == 4)
        eventually(lambda: made.sharing("b").members.find(("liar", liar.incarnation)))
        yield liar, prompt
