"""Pins and quotas: what was acknowledged is there, whatever happened to the process or the file."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import subprocess
import sys

import pytest

from kvwire.errors import ConfigError, InvalidArgument, StateUnavailable, TooManyItems
from kvwire.serving import intents as module
from kvwire.serving.intents import MAX_PINS, Intents, IntentStore
from kvwire.serving.state import StateFolder

KEYS = [index.to_bytes(32, "big") for index in range(1, 200)]


@pytest.fixture
def folder(tmp_path):
    with StateFolder(tmp_path / "state") as folder:
        yield folder


def filled(folder, pins: int = 4):
    """A file of a header, a first line, and more lines."""

    async def fill() -> None:
        store = IntentStore(folder)
        for key in KEYS[:pins]:
            await store.pin([key])
        await store.set_quota("t", 1, 1000)

    asyncio.run(fill())
    return folder.path / module.FILE_NAME


def read(folder) -> Intents:
    return IntentStore(folder).intents


@pytest.mark.asyncio
async def test_what_was_set_is_there_again(folder):
    store = IntentStore(folder)
    assert store.revision == 0
    assert await store.pin(KEYS[:3]) == 3
    assert await store.pin(KEYS[1:4]) == 1
    assert await store.unpin([KEYS[0], KEYS[9]]) == 1
    assert await store.set_quota("a", 1, 1000) == 1
    assert await store.set_quota("b", 2, 7) == 1
    assert await store.set_quota("b", 2, 0) == 1
    revision = store.revision
    # What changes nothing is not a change.
    assert await store.pin(KEYS[1:4]) == await store.set_quota("b", 2, 0) == 0
    assert store.revision == revision
    again = IntentStore(folder)
    assert list(again.intents.pins) == KEYS[1:4]
    assert again.intents.quotas == {("a", 1): 1000}
    assert again.revision == revision


@pytest.mark.asyncio
async def test_bad_input_changes_nothing(folder):
    store = IntentStore(folder)
    with pytest.raises(InvalidArgument, match="key 1 has 3 bytes"):
        await store.pin([KEYS[0], b"abc"])
    for tenant, tier, limit in (("", 1, 1), ("x" * 129, 1, 1), ("a", 0, 1), ("a", 1, -1), ("a", 1, 1 << 64)):
        with pytest.raises(InvalidArgument):
            await store.set_quota(tenant, tier, limit)
    await store.pin(index.to_bytes(32, "big") for index in range(MAX_PINS - 1))
    with pytest.raises(TooManyItems, match="65537 pins"):
        await store.pin([b"a" * 32, b"b" * 32])
    assert len(read(folder).pins) == len(store.intents.pins) == MAX_PINS - 1
    # The others of its group are not harmed.
    late, more = await asyncio.gather(
        store.pin([b"a" * 32, b"b" * 32]), store.pin([b"c" * 32]), return_exceptions=True
    )
    assert isinstance(late, TooManyItems)
    assert more == 1
    assert b"c" * 32 in read(folder).pins


@pytest.mark.asyncio
async def test_many_clients_at_once_share_the_disk(folder, monkeypatch):
    synced = []
    monkeypatch.setattr(module.os, "fsync", synced.append)
    store = IntentStore(folder)
    results = await asyncio.gather(*(store.pin([key]) for key in KEYS), *(store.pin([key]) for key in KEYS))
    assert sum(results) == len(KEYS)
    assert len(synced) < 10
    assert set(read(folder).pins) == set(KEYS)


@pytest.mark.asyncio
async def test_the_answer_waits_for_the_disk_and_the_loop_does_not(folder, monkeypatch):
    import threading

    allowed = threading.Event()
    monkeypatch.setattr(module.os, "fsync", lambda _descriptor: allowed.wait(20))
    store = IntentStore(folder)
    pinning = asyncio.create_task(store.pin([KEYS[0]]))
    for _ in range(20):
        await asyncio.sleep(0.002)
    assert not pinning.done()
    assert not store.intents.pins
    allowed.set()
    assert await pinning == 1
    await store.close()


@pytest.mark.asyncio
async def test_a_client_that_goes_away_harms_nobody(folder):
    store = IntentStore(folder)
    gone = asyncio.create_task(store.pin([KEYS[0]]))
    stays = asyncio.create_task(store.pin([KEYS[1]]))
    await asyncio.sleep(0)
    gone.cancel()
    assert await stays == 1
    await store.close()
    assert KEYS[1] in read(folder).pins


@pytest.mark.asyncio
@pytest.mark.parametrize("which", ["pwrite", "fsync"])
@pytest.mark.parametrize("fresh", [True, False])
async def test_a_full_disk_changes_nothing(folder, monkeypatch, which, fresh):
    store = IntentStore(folder)
    if not fresh:
        await store.pin([KEYS[0]])
    before = list(store.intents.pins), store.revision

    def fail(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(module.os, which, fail)
        for _ in range(2):
            with pytest.raises(StateUnavailable, match="No space left") as caught:
                await store.pin([KEYS[1]])
            assert caught.value.metadata["folder"] == str(folder.path)
    assert (list(store.intents.pins), store.revision) == before
    assert list(read(folder).pins) == before[0]
    # And when there is room again, it goes on.
    assert await store.pin([KEYS[2]]) == 1
    assert list(read(folder).pins) == [*before[0], KEYS[2]]


@pytest.mark.asyncio
async def test_a_file_that_cannot_be_cut_back_is_written_anew(folder, monkeypatch):
    store = IntentStore(folder)
    await store.pin([KEYS[0]])

    def fail(*_args):
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "ftruncate", fail)
        with pytest.raises(StateUnavailable):
            await store.pin([KEYS[1]])
        assert await store.pin([KEYS[2]]) == 1
    assert list(read(folder).pins) == [KEYS[0], KEYS[2]]


@pytest.mark.asyncio
async def test_half_a_line_on_a_full_disk_is_taken_back(folder, monkeypatch):
    store = IntentStore(folder)
    await store.pin([KEYS[0]])
    real = os.pwrite

    def half(descriptor, data, offset):
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "full")
        return real(descriptor, data[: len(data) // 2], offset)

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "pwrite", half)
        with pytest.raises(StateUnavailable):
            await store.pin([KEYS[1]])
    assert list(read(folder).pins) == [KEYS[0]]
    await store.pin([KEYS[2]])
    assert list(read(folder).pins) == [KEYS[0], KEYS[2]]


@pytest.mark.asyncio
async def test_a_folder_that_was_taken_away(folder):
    store = IntentStore(folder)
    await store.pin([KEYS[0]])
    moved = folder.path.with_name("moved")
    folder.path.rename(moved)
    with pytest.raises(StateUnavailable, match="No such file"):
        await store.pin([KEYS[1]])
    moved.rename(folder.path)
    assert await store.pin([KEYS[1]]) == 1
    assert list(read(folder).pins) == KEYS[:2]


def test_a_large_file_is_written_anew(folder, monkeypatch):
    monkeypatch.setattr(module, "REWRITE_ABOVE", 2000)

    async def churn() -> None:
        store = IntentStore(folder)
        for _ in range(60):
            await store.pin([KEYS[0]])
            await store.unpin([KEYS[0]])
        await store.set_quota("a", 1, 5)

    asyncio.run(churn())
    assert (folder.path / module.FILE_NAME).stat().st_size < 4000
    assert read(folder).quotas == {("a", 1): 5}
    assert read(folder).revision == 121


def test_a_cut_off_last_line_goes_with_a_word(folder, caplog):
    path = filled(folder)
    content = path.read_bytes()
    last = content[:-1].rindex(b"\n") + 1
    for end in range(last + 1, len(content) - 1):
        path.write_bytes(content[:end])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = read(folder)
        assert list(found.pins) == KEYS[:4]
        assert not found.quotas
        assert [record.message.split(": ")[1][:7] for record in caplog.records] == ["cut off"]

    async def go_on() -> None:
        store = IntentStore(folder)
        await store.pin([KEYS[7]])

    asyncio.run(go_on())
    assert list(read(folder).pins) == [*KEYS[:4], KEYS[7]]
    # The line is whole and only its end is missing: it was not acknowledged, and holds nevertheless.
    path.write_bytes(content[:-1])
    assert read(folder).quotas
    asyncio.run(go_on())
    assert read(folder).quotas
    assert list(read(folder).pins) == [*KEYS[:4], KEYS[7]]


def test_zeros_of_a_power_cut_are_cut_off(folder):
    path = filled(folder)
    content = path.read_bytes()
    last = content[:-1].rindex(b"\n") + 1
    for torn in (b"\0" * 500, content[last : last + 30] + b"\0" * 100, content[last:-9] + b"\0" * 8 + b"\n"):
        path.write_bytes(content[:last] + torn)
        assert list(read(folder).pins) == KEYS[:4]


def test_any_flipped_byte_is_an_error_that_names_the_file(folder):
    path = filled(folder)
    content = path.read_bytes()
    for position in range(len(content)):
        for bit in (0x01, 0x10, 0x80):
            damaged = bytearray(content)
            damaged[position] ^= bit
            path.write_bytes(damaged)
            problem, found = "", None
            try:
                found = read(folder)
            except ConfigError as error:
                problem = str(error)
            # The case of a checksum means nothing. All else does.
            same = found is not None and (list(found.pins), found.quotas) == (KEYS[:4], {("t", 1): 1000})
            assert same or str(path) in problem


def test_an_empty_or_newer_file_is_an_error(folder):
    path = filled(folder)
    content = path.read_bytes()
    for bad in (b"", b"\n", content[:20], b"hello", module._line({"format": 99})):
        path.write_bytes(bad)
        with pytest.raises(ConfigError, match="damaged in line 1"):
            read(folder)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        read(folder)


def test_a_folder_belongs_to_one_process(folder, tmp_path):
    with pytest.raises(ConfigError, match="in use by another process"):
        StateFolder(folder.path)
    code = "import sys; from kvwire.serving.state import StateFolder; StateFolder(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(folder.path)], capture_output=True, check=False)
    assert done.returncode
    assert b"in use by another process" in done.stderr
    folder.close()
    StateFolder(folder.path).close()
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be used"):
        StateFolder(tmp_path / "file")


VICTIM = """
import asyncio, sys
from kvwire.serving.intents import IntentStore
from kvwire.serving.state import StateFolder

async def client(store, number):
    for index in range(100000):
        key = bytes([number]) + index.to_bytes(31, "big")
        await store.pin([key])
        sys.stdout.write(key.hex() + "\\n")
        sys.stdout.flush()

async def main():
    store = IntentStore(StateFolder(sys.argv[1]))
    await asyncio.gather(*(client(store, number) for number in range(4)))

asyncio.run(main())
"""


def test_killed_at_any_moment_every_acknowledged_pin_is_there(tmp_path):
    acknowledged = set()
    for round_number in range(3):
        victim = subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(tmp_path / "state")], stdout=subprocess.PIPE, text=True
        )
        told = [victim.stdout.readline() for _ in range(random.Random(round_number).randint(20, 400))]
        victim.kill()
        told += victim.stdout.readlines()
        victim.stdout.close()
        victim.wait(10)
        acknowledged |= {bytes.fromhex(line) for line in told if len(line) == 65}
        with StateFolder(tmp_path / "state") as folder:
            assert acknowledged <= set(read(folder).pins)
    assert len(acknowledged) > 20
