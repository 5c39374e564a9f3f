"""Names, buffers and threads between a lower tier and its storage."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.server.tiers.backends.aside import Aside
from kvwire.server.tiers.backends.base import WrongSize, checked, total
from kvwire.server.tiers.backends.copies import Filling, joined
from kvwire.server.tiers.backends.folder import _batches
from kvwire.server.tiers.threads import Threads

pytestmark = pytest.mark.leakcheck("threads")
sizes = st.lists(st.integers(0, 40), max_size=8)


def cut(data: bytes, lengths: list[int]) -> list[bytes]:
    parts = []
    for length in lengths:
        parts.append(data[:length])
        data = data[length:]
    return [*parts, data]


@given(st.binary(max_size=200), sizes, sizes)
def test_filling_puts_every_byte_where_it_belongs(data, sent, asked):
    parts = [bytearray(len(part)) for part in cut(data, asked)]
    filling = Filling([memoryview(part) for part in parts])
    for piece in cut(data, sent):
        filling.take(memoryview(piece))
    assert filling.lacking == 0
    assert b"".join(parts) == data
    with pytest.raises(WrongSize):
        filling.take(memoryview(b"x"))


@given(st.binary(max_size=200), sizes)
def test_joining_copies(data, lengths):
    parts = [bytearray(part) for part in cut(data, lengths)]
    whole = joined(parts)
    assert total(parts) == len(data)
    for part in parts:
        part[:] = bytes(len(part))
    assert whole == data


@settings(max_examples=25)
@given(sizes)
def test_batches_of_one_system_call_have_every_byte_once(lengths):
    parts = [os.urandom(length << 16) for length in lengths]
    batches = list(_batches(parts))
    assert b"".join(b"".join(batch) for batch in batches) == b"".join(parts)
    assert all(0 < total(batch) <= 4 << 20 and len(batch) <= 64 for batch in batches)


@given(st.text(max_size=12))
def test_bl50_no_name_gets_out_of_its_folder(name):
    try:
        checked(name)
    except ValueError:
        return
    path = os.path.normpath(os.path.join("/base", name))  # noqa: PTH118 - nothing is resolved
    assert path == f"/base/{name}"


@pytest.mark.asyncio
async def test_a_cancelled_call_ends_with_its_work_and_work_that_waits_never_begins():
    threads, begun, may_end, steps = Threads(1, "test"), threading.Event(), threading.Event(), []

    def long_work(wanted):
        steps.append("begun")
        begun.set()
        may_end.wait(10)
        steps.append("ended")
        wanted.check()

    first = asyncio.create_task(threads.run(long_work))
    while not begun.is_set():  # noqa: ASYNC110 - it is set by a thread
        await asyncio.sleep(0.001)
    second = asyncio.create_task(threads.run(lambda _: steps.append("never")))
    await asyncio.sleep(0)
    for call in (second, first):
        call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    await asyncio.sleep(0.01)
    first.cancel()
    assert not first.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    threads.close()
    assert steps == ["begun", "ended"]


@pytest.mark.asyncio
async def test_a_loop_aside_gives_results_errors_and_cancellations():
    aside, seen = Aside("test-aside"), []

    async def call(result):
        seen.append(threading.current_thread().name)
        if isinstance(result, Exception):
            raise result
        try:
            await asyncio.sleep(result)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        return result

    assert await aside.run(call(0)) == 0
    with pytest.raises(LookupError):
        await aside.run(call(LookupError("x")))
    waiting = asyncio.create_task(aside.run(call(60)))
    left = asyncio.create_task(aside.run(call(60)))
    while len(seen) < 4:  # noqa: ASYNC110 - they are seen by a thread
        await asyncio.sleep(0.001)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    aside.close()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert seen == ["test-aside"] * 4 + ["cancelled"] * 2
    aside.close()
