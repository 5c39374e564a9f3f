"""One object on its way: its pieces come in any order, on several threads, and are hashed in theirs."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from kvwire.errors import ChecksumMismatch, TransferFailed
from kvwire.server.peers.receiving import Part
from kvwire.transfer.checksum import checksum
from kvwire.transfer.ending import Ending

PIECE = 1000


def part_of(pieces, *, told=None):
    data = np.random.default_rng(pieces).integers(0, 256, pieces * PIECE, dtype=np.uint8)
    part = Part((3, 0), memoryview(data), 100, told or checksum(data))
    part.ops = [
        SimpleNamespace(ending=Ending(), buffer=data[i * PIECE : (i + 1) * PIECE]) for i in range(pieces)
    ]
    return part


def come(part, index):
    part.ops[index].ending.resolve()
    return part.advance()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_only_the_last_to_be_hashed_is_the_last(order):
    part = part_of(4)
    assert [come(part, index) for index in order] == [False, False, False, True]
    assert part.verdict("ucx-remote") is None


def test_other_bytes_are_found_out():
    part = part_of(2, told=checksum(b"other"))
    assert not come(part, 0)
    assert come(part, 1)
    assert isinstance(part.verdict("ucx-remote"), ChecksumMismatch)


def test_behind_a_piece_that_has_failed_nothing_is_hashed():
    part = part_of(3)
    assert not come(part, 0)
    part.ops[1].ending.resolve(TransferFailed("no", path="ucx", cause="test"))
    assert not part.advance()
    assert not come(part, 2)


def test_a_thread_does_not_wait_for_one_that_hashes():
    part = part_of(3)
    began, go_on = threading.Event(), threading.Event()
    hashed = []

    def slow(piece):
        began.set()
        assert go_on.wait(10)
        hashed.append(bytes(piece))

    part._hash = SimpleNamespace(update=slow)
    with ThreadPoolExecutor(1) as other:
        first = other.submit(come, part, 0)
        assert began.wait(10)
        # Both are left to the one that is at it.
        assert not come(part, 1)
        assert not come(part, 2)
        go_on.set()
        assert first.result(10)
    assert hashed == [bytes(op.buffer) for op in part.ops]


def test_however_the_threads_meet_one_of_them_has_the_last():
    for seed in range(100):
        part = part_of(16)
        order = random.Random(seed).sample(range(16), 16)
        with ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(lambda index, part=part: come(part, index), order)) == 1
        assert part.verdict("ucx-local") is None
