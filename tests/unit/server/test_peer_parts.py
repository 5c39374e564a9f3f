"""The pure parts of sharing: members, hints, whom to ask, whom to leave alone, what answers are good."""

from __future__ import annotations

import pytest

from kvwire.errors import IncarnationStale, TransferFailed
from kvwire.server.layout import KvGroup, KvLayout, ShardMap, layout_digest
from kvwire.server.peers import borrowing
from kvwire.server.peers.choosing import last_of, longest_run
from kvwire.server.peers.hints import Hints
from kvwire.server.peers.members import KEEP_S, Members, PeerInfo
from kvwire.server.peers.standing import LONGEST_REST_S, Standing
from kvwire.transfer import tags
from kvwire.v1 import peer_service_pb2 as pb
from kvwire.v1 import transfer_pb2

A1, A2, B1 = ("a", b"1" * 16), ("a", b"2" * 16), ("b", b"1" * 16)


def info(place, addresses=("unix:/x",)):
    return PeerInfo(place[0], place[1], addresses, 4, 1, shares=True)


class TestMembers:
    def test_a_new_run_takes_the_place_of_the_former(self):
        members = Members("self")
        members.joined("c", info(A1))
        members.joined("c", info(A2))
        assert members.find(A1) is None
        assert members.find(A2) == info(A2)

    def test_it_is_not_among_the_others(self):
        members = Members("a")
        members.joined("c", info(A1))
        assert members.latest() == []

    def test_one_that_left_is_gone_and_one_that_is_not_told_of_again_goes_after_a_while(self):
        members = Members("self")
        members.joined("c", info(A1))
        members.joined("c", info(B1))
        members.left("c", "a")
        assert members.latest() == [info(B1)]
        members.began("c")
        members.synced("c", members.turn, now=100.0)
        members.sweep(100.0 + KEEP_S - 1)
        assert members.latest() == [info(B1)]
        members.sweep(100.0 + KEEP_S)
        assert members.latest() == []

    def test_one_that_is_told_of_again_stays(self):
        members = Members("self")
        members.joined("c", info(A1))
        members.began("c")
        since = members.turn
        members.joined("c", info(A1))
        members.synced("c", since, now=0.0)
        members.sweep(KEEP_S + 1)
        assert members.latest() == [info(A1)]

    def test_each_coordinator_has_its_own_view(self):
        members = Members("self")
        members.joined("old", info(A1))
        members.joined("new", info(A2))
        assert members.find(A1) == info(A1)
        assert members.latest() == [info(A2)]
        members.left("new", "a")
        assert members.latest() == [info(A1)]


class TestHints:
    def test_the_least_recently_used_go_first(self):
        hints = Hints(2)
        hints.note(b"x", (A1,))
        hints.note(b"y", (B1,))
        assert hints.of([b"x"]) == [(A1,)]
        hints.note(b"z", (A1,))
        assert hints.of([b"x", b"y", b"z"]) == [(A1,), (), (A1,)]

    def test_what_was_not_there_is_no_hint(self):
        hints = Hints()
        hints.note(b"x", (A1, B1))
        hints.drop(b"x", A1)
        assert hints.of([b"x"]) == [(B1,)]
        hints.drop(b"x", B1)
        assert len(hints) == 0


class TestChoosing:
    PLACES = ((A1, B1), (A1, B1), (A1,), (B1,), (B1,))

    def test_the_longest_run_from_there_on(self):
        assert longest_run(self.PLACES, 0, ()) == (A1, 3)
        assert longest_run(self.PLACES, 3, ()) == (B1, 2)

    def test_without_those_that_rest(self):
        assert longest_run(self.PLACES, 0, {A1}) == (B1, 2)
        assert longest_run(self.PLACES, 2, {A1}) is None
        assert longest_run(self.PLACES, 5, ()) is None

    def test_equals_take_turns(self):
        found = {longest_run(((A1, B1),), 0, ()) for _ in range(100)}
        assert found == {(A1, 1), (B1, 1)}

    def test_the_last_one(self):
        assert (last_of(self.PLACES, A1), last_of(self.PLACES, B1), last_of(self.PLACES, A2)) == (3, 5, 0)


class TestStanding:
    def test_failures_rest_longer_and_longer_and_a_success_ends_it(self):
        standing, now = Standing(), 0.0
        rests = []
        for _ in range(8):
            standing.failed(A1, "it hangs", now)
            started = now
            while standing.rests(A1, b"", now):
                now += 0.1
            rests.append(now - started)
        assert rests == sorted(rests)
        assert rests[0] < 1
        assert rests[-1] <= LONGEST_REST_S + 0.2
        assert standing.problem(A1) == "it hangs"
        assert not standing.rests(A2, b"", 0.0)
        standing.worked(A1, b"")
        assert standing.problem(A1) == ""

    def test_a_server_that_leases_and_whose_bytes_do_not_come_rests_all_the_same(self):
        standing, now = Standing(), 0.0
        rests = []
        for _ in range(4):
            standing.failed(A1, "nothing came", now, moving=True)
            rests.append(
                next(after for after in range(1, 200) if not standing.rests(A1, b"", now + after / 10))
            )
            standing.worked(A1, b"")
        assert rests == sorted(set(rests))
        assert standing.problem(A1) == "nothing came"
        standing.moved(A1)
        assert not standing.rests(A1, b"", now)
        assert standing.problem(A1) == ""

    def test_a_problem_is_told_once(self):
        standing = Standing()
        assert standing.refused(A1, b"", "differs", 0.0)
        assert not standing.refused(A1, b"", "differs", 0.0)

    def test_what_is_refused_for_one_model_is_for_that_only(self):
        standing = Standing()
        standing.refused(A1, b"layout", "differs", 0.0)
        assert standing.rests(A1, b"layout", 1.0)
        assert not standing.rests(A1, b"other", 1.0)
        standing.worked(A1, b"other")
        assert standing.rests(A1, b"layout", 1.0)
        standing.forget(A1)
        assert not standing.rests(A1, b"layout", 1.0)


SHARDS = ShardMap(KvLayout(2, (KvGroup("full", 4, 0, 1, 6000, 1),)), 4)
OFFERS = ("ucx-local",)


def answer(**more):
    reply = pb.LookupAndLeaseResponse(incarnation=A1[1], hit_chunks=2, ucx_address=b"address")
    ticket = reply.ticket
    ticket.lease_id, ticket.path, ticket.piece_bytes = 9, transfer_pb2.DATA_PATH_UCX_LOCAL, 4096
    for number, (index, rank) in enumerate([(0, 0), (0, 1), (1, 1)]):
        ticket.slots.add(
            chunk_index=index,
            kv_rank=rank,
            size_bytes=6000,
            first_tag=tags.encode(tags.Kind.PEER, 5, 2 * number),
            checksum=bytes(16),
        )
    for name, value in more.items():
        setattr(ticket.slots[1] if hasattr(ticket.slots[1], name) else ticket, name, value)
    return reply


def check(reply, masks=(0, 1), place=A1, transfer=5):
    return borrowing.check_answer(reply, place, SHARDS, masks, transfer, OFFERS)


def test_a_good_answer_is_taken_object_by_object():
    ticket = check(answer())
    assert set(ticket.objects) == {(0, 0), (0, 1), (1, 1)}
    assert (ticket.lease_id, ticket.path, ticket.address) == (9, "ucx-local", b"address")


def test_nothing_lent_is_an_answer():
    assert not check(pb.LookupAndLeaseResponse(incarnation=A1[1], hit_chunks=1)).objects


def test_another_run_is_no_answer():
    with pytest.raises(IncarnationStale):
        check(answer(), place=A2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunk_index": 2},
        {"group_index": 1},
        {"kv_rank": 2},
        {"kv_rank": 0},
        {"size_bytes": 6001},
        {"checksum": b"short"},
        {"first_tag": tags.encode(tags.Kind.PEER, 6, 2)},
        {"path": transfer_pb2.DATA_PATH_SHM},
        {"path": transfer_pb2.DATA_PATH_UCX_REMOTE},
        {"piece_bytes": 1},
        {"piece_bytes": 1 << 40},
    ],
    ids=str,
)
def test_an_answer_that_no_honest_server_gives_is_refused(wrong):
    with pytest.raises(TransferFailed, match="cannot be right"):
        check(answer(**wrong))


def test_an_object_that_was_not_asked_for_is_refused():
    with pytest.raises(TransferFailed, match="not asked for"):
        check(answer(), masks=(1, 1))


def test_transfer_ids_are_never_used_twice_and_begin_anywhere():
    numbers = borrowing.TransferIds()
    found = [numbers.next() for _ in range(1000)]
    assert len(set(found)) == 1000
    assert all(1 <= number <= tags.MAX_LEASE for number in found)
    assert borrowing.TransferIds().next() != borrowing.TransferIds().next()


def test_the_vector_of_the_layout_digest():
    layout = KvLayout(1, (KvGroup("full", 16, 0, 2, 4096, 16),))
    told = layout_digest(layout, 256).hex()
    assert told == "495af97650a44a45673016d52af7d64e04fd6a0bfd5edebe38656f258b5e5312"
