"""What happened to chunks, in numbered batches: kept until everybody has them, within bounds."""

from __future__ import annotations

import asyncio

import pytest

from kvwire.server.journal import Entry, EventKind, Journal, JournalLimits
from kvwire.server.reporting.batches import BatchEncoder, with_lost
from kvwire.v1 import event_pb2

L1 = 1


def store(name: str, tokens: bytes = b"") -> Entry:
    return Entry(EventKind.STORE, L1, "memory", name.encode(), 10, tokens)


def delete(name: str) -> Entry:
    return Entry(EventKind.DELETE, L1, "memory", name.encode())


class Fixture:
    """Batches are texts: `3:STORE a,ACCESS a*2`."""

    def __init__(self, **limits) -> None:
        self.opened = 0
        self.journal = Journal(self.encode, self.on_open, JournalLimits(**limits))

    def on_open(self) -> None:
        self.opened += 1

    @staticmethod
    def encode(sequence, entries) -> bytes:
        told = [
            f"{each.kind.name} {each.key.decode()}" + (f"*{each.uses}" if each.uses else "")
            for each in entries
        ]
        return f"{sequence}:{','.join(told)}".encode()

    def batch(self, *entries: Entry) -> None:
        for entry in entries or (store("a"),):
            self.journal.note(entry)
        self.journal.close()


def taken(reader, limit: int = 100) -> list[str]:
    return [
        each.payload.decode() + (f" lost {each.lost}" if each.lost else "") for each in reader.take(limit)
    ]


def test_batches_are_numbered_without_gaps_and_keep_the_order():
    made = Fixture()
    reader = made.journal.reader()
    made.batch(store("a"), delete("a"), store("a"))
    made.journal.close()
    made.batch(delete("a"))
    assert taken(reader) == ["1:STORE a,DELETE a,STORE a", "2:DELETE a"]
    assert (made.opened, made.journal.closed_sequence) == (2, 2)


def test_uses_are_one_entry_per_chunk_and_batch():
    made = Fixture()
    reader = made.journal.reader()
    for _ in range(3):
        made.journal.note_accesses(L1, "memory", [b"a", b"b"])
    made.journal.note_accesses(L1, "memory", [b"b"])
    made.journal.note_accesses(L1, "memory", [])
    made.journal.close()
    made.journal.note_accesses(L1, "memory", [b"a"])
    made.journal.close()
    assert taken(reader) == ["1:ACCESS a*3,ACCESS b*4", "2:ACCESS a*1"]


def test_nothing_used_opens_no_batch():
    made = Fixture()
    made.journal.note_accesses(L1, "memory", [])
    assert not made.opened


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [({"batch_events": 3}, b""), ({"batch_bytes": 600}, bytes(100))],
    ids=["entries", "bytes"],
)
def test_a_batch_has_a_limit(limits, tokens):
    made = Fixture(**limits)
    reader = made.journal.reader()
    for name in "abcdefg":
        made.journal.note(store(name, tokens))
    assert taken(reader) == ["1:STORE a,STORE b,STORE c", "2:STORE d,STORE e,STORE f"]
    made.journal.close()
    assert taken(reader) == ["3:STORE g"]


def test_stores_and_uses_together_keep_to_the_limit_of_entries():
    made = Fixture(batch_events=3)
    reader = made.journal.reader()
    made.journal.note(store("a"))
    made.journal.note(store("b"))
    made.journal.note_accesses(L1, "memory", [b"a", b"b"])
    made.journal.close()
    assert taken(reader) == ["1:STORE a,STORE b,ACCESS a*1", "2:ACCESS b*1"]


def test_what_everybody_has_is_let_go():
    made = Fixture()
    fast, slow = made.journal.reader(), made.journal.reader()
    for _ in range(4):
        made.batch()
    fast.take(4)
    fast.acknowledge(4)
    assert made.journal.held_batches == 4
    slow.take(4)
    slow.acknowledge(3)
    assert (made.journal.held_batches, made.journal.held_bytes) == (1, len("4:STORE a"))
    slow.leave()
    assert (made.journal.held_batches, made.journal.held_bytes) == (0, 0)
    assert not made.journal.dropped_batches


def test_without_readers_nothing_is_kept_and_numbers_go_on():
    made = Fixture()
    made.batch()
    made.batch()
    assert (made.journal.closed_sequence, made.journal.held_batches, made.journal.held_bytes) == (2, 0, 0)
    reader = made.journal.reader()
    made.batch()
    assert taken(reader) == ["3:STORE a"]


def test_memory_is_bounded_and_each_reader_is_told_what_it_lost():
    made = Fixture(held_bytes=2 * len("1:STORE a"))
    here, away = made.journal.reader(), made.journal.reader()
    for _ in range(3):
        made.batch()
        here.take(1)
    for _ in range(2):
        made.batch()
    assert (made.journal.held_batches, made.journal.dropped_batches) == (2, 3)
    assert taken(here) == ["4:STORE a", "5:STORE a"]
    assert taken(away) == ["4:STORE a lost 3", "5:STORE a"]
    assert taken(away) == []


def test_a_batch_above_the_bound_is_lost_and_not_kept():
    made = Fixture(held_bytes=12)
    reader = made.journal.reader()
    made.batch(store("a" * 20))
    assert (made.journal.held_batches, taken(reader)) == (0, [])
    made.batch()
    assert taken(reader) == ["2:STORE a lost 1"]


def test_after_a_break_what_was_not_acknowledged_is_taken_again():
    made = Fixture()
    reader = made.journal.reader()
    for _ in range(3):
        made.batch()
    assert len(taken(reader)) == 3
    reader.acknowledge(1)
    reader.rewind()
    assert taken(reader) == ["2:STORE a", "3:STORE a"]


def test_an_answer_never_goes_back_nor_beyond_what_there_is():
    made = Fixture()
    reader = made.journal.reader()
    for _ in range(3):
        made.batch()
    reader.acknowledge(2)
    reader.acknowledge(1)
    assert reader.acknowledged == 2
    reader.acknowledge(99)
    assert reader.acknowledged == 3
    made.batch()
    reader.rewind()
    assert taken(reader) == ["4:STORE a"]


@pytest.mark.parametrize(("known", "left"), [(0, 4), (2, 2), (4, 0), (10**9, 0)])
def test_a_reader_goes_on_where_the_other_side_is(known, left):
    made = Fixture()
    reader = made.journal.reader()
    for _ in range(4):
        made.batch()
    reader.seek(known)
    assert len(taken(reader)) == left
    made.batch()
    assert taken(reader) == ["5:STORE a"]


def test_another_side_that_knows_less_than_was_acknowledged_sees_a_gap():
    """Acknowledged batches are gone: whoever forgot them needs a snapshot, and sees that by the number."""
    made = Fixture()
    reader = made.journal.reader()
    made.batch()
    reader.take(1)
    reader.acknowledge(1)
    reader.seek(0)
    made.batch()
    assert taken(reader) == ["2:STORE a"]


def test_a_waiting_reader_is_woken_by_a_closed_batch():
    async def run() -> None:
        made = Fixture()
        reader = made.journal.reader()
        waiting = asyncio.ensure_future(reader.wait(10))
        made.journal.note(store("a"))
        await asyncio.sleep(0)
        assert not waiting.done()
        made.journal.close()
        (closed,) = await asyncio.wait_for(waiting, 5)
        assert closed.sequence == 1
        waiting = asyncio.ensure_future(reader.wait(10))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        made.batch()
        assert [each.sequence for each in await reader.wait(10)] == [2]

    asyncio.run(run())


def test_what_was_lost_is_in_the_bytes_of_that_reader_alone():
    encode = BatchEncoder("server", bytes(16))
    journal = Journal(encode, lambda: None, JournalLimits(held_bytes=150))
    here, away = journal.reader(), journal.reader()
    for _ in range(3):
        journal.note(store("a"))
        journal.close()
        last = here.take(1)
    mine, theirs = (
        event_pb2.CacheEventBatch.FromString(with_lost(each)) for each in (*last, away.take(1)[0])
    )
    assert (mine.sequence, mine.lost) == (3, 0)
    assert theirs.lost == theirs.sequence - 1 > 0
    assert theirs.events == mine.events
    assert theirs.server_id == "server"
