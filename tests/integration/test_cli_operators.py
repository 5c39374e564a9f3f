"""`kvwire objects | pin | quota | evict | clear` against real programs, for people and for programs."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys

import pytest

from kvwire.cli import app
from kvwire.keys import salt_digest
from support.coordinator_process import FAST, coordinator_process
from support.raw_client import OBJECT_BYTES, RawClient, tokens
from support.server_process import environment, server_process
from support.waiting import eventually

SALT = "the secret of red"
RED = salt_digest(SALT)


def packed(chunks: int, seed: int = 0) -> str:
    return ",".join(str(seed * 1_000 + position) for position in range(chunks * 4))


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    (folder / "red.salt").write_text(SALT + "\n")
    with (
        coordinator_process(folder, *FAST, f"--state={folder / 'fleet'}") as coordinator,
        server_process(
            folder,
            "--policy=tenant",
            "--chunk-size=4",
            f"--state={folder / 'state'}",
            f"--coordinator={coordinator.address}",
        ) as server,
    ):
        yield server, coordinator, folder


@pytest.fixture
def client(programs):
    found = RawClient(programs[0].channel()).register()
    yield found
    found.unregister()
    app.main(["clear", "--all", "--yes", "--json", "--address", programs[0].address])


@pytest.fixture
def run(programs, capsys):
    """`run(*argv)`: what it printed, exit code 0 unless told; `at`: which program."""

    def call(*argv, code=0, at=0):
        capsys.readouterr()
        assert app.main([*argv, "--address", programs[at].address]) == code, capsys.readouterr().err
        return capsys.readouterr()

    return call


@pytest.fixture
def as_json(run):
    return lambda *argv, **options: json.loads(run(*argv, "--json", **options).out)


def salt_file(programs) -> str:
    return str(programs[2] / "red.salt")


def test_objects(programs, client, run, as_json, monkeypatch):
    assert "Nothing is cached there." in run("objects").out
    client.store("a", tokens(3))
    client.store("b", tokens(2), salt=SALT)
    found = as_json("objects", "--all")
    assert (found["count"], found["size_bytes"], found["more"]) == (5, 5 * OBJECT_BYTES, False)
    assert [each["tenant"] for each in found["chunks"]] == [""] * 3 + [RED] * 2
    assert [each["chunk_key"] for each in found["chunks"]][:3] == [
        key.hex() for key in client.keys(tokens(3))
    ]
    assert as_json("objects", "--salt-file", salt_file(programs))["count"] == 2
    assert as_json("objects", "--tenant", "none", "--tier", "l1")["count"] == 3
    first = as_json("objects", "--limit", "2")
    assert (first["count"], first["more"]) == (2, True)
    monkeypatch.setattr("kvwire.cli.commands.objects.WIDE", 1000)
    assert found["chunks"][0]["chunk_key"][:16] + "...  L1 memory" in run("objects").out
    monkeypatch.undo()
    table = run("objects", "--limit", "4").out
    assert "there are more" in table
    assert "L1 memory" in table
    assert RED in table
    assert SALT not in table
    assert "Nothing of that tenant" in run("objects", "--tenant", "0" * 16).out
    assert as_json("objects", "--tier", "l2") == {"chunks": [], "count": 0, "size_bytes": 0, "more": False}


def test_a_listing_of_several_pages(client, as_json, run, monkeypatch):
    monkeypatch.setattr("kvwire.cli.commands.objects.PAGE", 2)
    client.store("a", tokens(5))
    keys = [each["chunk_key"] for each in as_json("objects", "--all")["chunks"]]
    assert keys == [key.hex() for key in client.keys(tokens(5))]
    assert "5 chunks" in run("objects", "--all").out


def test_pin_and_remove(client, run, as_json):
    client.store("a", tokens(3))
    prompt = ("--tokens", packed(3))
    assert run("pin", *prompt).out == "pinned 3 chunks\n"
    assert "shorter than one chunk" in run("pin", "--tokens", "1,2").err
    assert as_json("pin", *prompt) == {"pinned_chunks": 3}
    assert re.search(r"pinned +3 chunks, 192 KiB", run("status").out)
    told = run("clear", "--all", "--yes", code=app.FAILED)
    assert "kept 3" in told.out
    assert "3 chunks are in use or pinned" in told.err
    assert "a pin" in run("objects").out
    keys = ",".join(key.hex() for key in client.keys(tokens(1)))
    assert as_json("pin", "--remove", "--keys", keys) == {"unpinned_chunks": 1}
    assert run("pin", "--remove", *prompt).out == "unpinned 2 chunks\n"


def test_pins_and_quotas_of_the_fleet(programs, client, run, as_json):
    server = programs[0]
    client.store("a", tokens(2))
    prompt = ("--tokens", packed(2))
    told = run("pin", *prompt, at=1, code=app.USAGE).err
    assert "--namespace-from" in told
    assert as_json("pin", *prompt, "--namespace-from", server.address, at=1) == {"pinned_chunks": 2}
    eventually(lambda: client.status().memory.pinned_chunks == 2)
    assert run("pin", *prompt, "--model", "test/model", "--remove", at=1).out == "unpinned 2 chunks\n"
    eventually(lambda: not client.status().memory.pinned_chunks)
    run("quota", "set", "64KiB", "--tenant", "none", at=1)
    (row,) = as_json("quota", "list", at=1)["quotas"]
    assert (row["tenant"], row["limit_bytes"], row["backend"]) == ("none", OBJECT_BYTES, "")
    assert "64 KiB" in run("quota", "list", at=1).out
    eventually(lambda: client.hits(tokens(2)) == 1)
    assert run("quota", "set", "0", "--tenant", "none", at=1).out == "tenant none: no limit in L1\n"
    assert "No tenant has a quota" in run("quota", "list", at=1).out
    eventually(lambda: not any(row["limit_bytes"] for row in as_json("quota", "list")["quotas"]))


def test_quotas(programs, client, run, as_json):
    client.store("a", tokens(3), salt=SALT)
    client.store("b", tokens(2))
    told = run("quota", "set", "128KiB", "--salt-file", salt_file(programs))
    assert told.out == f"tenant {RED}: 128 KiB in L1\n"
    rows = {row["tenant"]: row for row in as_json("quota", "list")["quotas"]}
    assert (rows[RED]["limit_bytes"], rows["none"]["limit_bytes"]) == (2 * OBJECT_BYTES, 0)
    assert rows["none"]["used_bytes"] == 2 * OBJECT_BYTES
    eventually(lambda: client.hits(tokens(3), SALT) == 2)
    table = run("quota", "list", "--tenant", RED).out
    assert "100%" in table
    assert as_json("quota", "set", "0", "--tenant", RED) == {"tenant": RED, "tier": "l1", "limit_bytes": 0}
    assert "--l2" in run("quota", "set", "1GiB", "--tenant", RED, "--tier", "l2", code=app.USAGE).err


def test_evict_and_clear_drop_what_was_named(programs, client, run, as_json):
    client.store("a", tokens(3))
    client.store("b", tokens(3), salt=SALT)
    client.store("c", tokens(2, seed=1))
    done = run("evict", "--tokens", packed(3), "--yes", "--tier", "l1")
    assert done.out == "dropped 3 chunks, kept 0\n"
    assert (client.hits(tokens(3), SALT), client.hits(tokens(2, seed=1))) == (3, 2)
    key = client.keys(tokens(2, seed=1))[1].hex()
    assert as_json("evict", "--keys", key, "--yes") == {"evicted_chunks": 1, "kept_chunks": 0}
    assert (
        as_json("clear", "--salt-file", salt_file(programs), "--yes", "--tier", "l2")["cleared_chunks"] == 0
    )
    assert as_json("clear", "--salt-file", salt_file(programs), "--yes")["cleared_chunks"] == 3
    assert as_json("clear", "--model", "test/model", "--tenant", "none", "--yes")["cleared_chunks"] == 1


def test_what_is_read_at_this_moment_is_kept_and_told(client, run):
    client.store("a", tokens(2))
    client.lookup("held", tokens(2))
    told = run("evict", "--tokens", packed(2), "--yes", code=app.FAILED)
    assert told.out == "dropped 0 chunks, kept 2\n"
    assert "2 chunks are in use or pinned" in told.err
    client.end_session("held")


def test_prefetch_tells_what_nobody_has(client, run, as_json):
    client.store("a", tokens(2))
    assert "the first 2 of 2 chunks" in run("prefetch", "--tokens", packed(2)).out
    told = run("prefetch", "--tokens", packed(3), code=app.FAILED)
    assert "the first 2 of 3 chunks" in told.out
    assert "1 chunks are neither here nor anywhere below" in told.err
    found = as_json("prefetch", "--tokens", packed(3), code=app.FAILED)
    assert (found["resident_chunks"], found["asked_chunks"], found["l2_chunks"]) == (2, 3, 0)


@pytest.mark.parametrize("argv", [("clear", "--all"), ("evict", "--keys", "00" * 32)])
def test_without_a_terminal_nothing_is_dropped_unless_yes_is_said(client, run, argv, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    client.store("a", tokens(2))
    told = run(*argv, code=app.USAGE)
    assert "say --yes" in told.err
    assert client.hits(tokens(2)) == 2


@pytest.mark.parametrize(("answer", "left"), [("n", 2), ("", 2), ("y", 0)])
def test_at_a_terminal_it_asks_first(programs, client, answer, left):
    client.store("a", tokens(2))
    ours, theirs = pty.openpty()
    argv = ["-m", "kvwire.cli", "clear", "--all", "--address", programs[0].address]
    with subprocess.Popen(
        [sys.executable, *argv],
        stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True,
    ) as process:  # fmt: skip
        os.close(theirs)
        os.write(ours, answer.encode() + b"\n")
        out, err = process.communicate(timeout=30)
    os.close(ours)
    assert f"Drop all chunks from all tiers of {programs[0].address}? [y/N]" in err
    assert client.hits(tokens(2)) == left
    if left:
        assert (process.returncode, out) == (app.FAILED, "")
        assert "Nothing was changed." in err
    else:
        assert (process.returncode, out) == (app.OK, "dropped 2 chunks, kept 0\n")


@pytest.mark.parametrize(
    "argv",
    [
        ("objects",),
        ("evict", "--keys", "00" * 32, "--yes"),
        ("clear", "--all", "--yes"),
        ("prefetch", "--keys", "00" * 32),
    ],
)
def test_a_coordinator_says_whom_to_ask(run, argv):
    assert "ask a cache server; `kvwire members` lists them" in run(*argv, at=1, code=app.FAILED).err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("objects", "--tenant", "red"), "16 hex digits"),
        (("objects", "--limit", "0"), "--limit is at least 1"),
        (("objects", "--limit", "5", "--all"), "exclude each other"),
        (("objects", "--tenant", RED, "--salt-file", "x"), "one of --tenant and --salt-file"),
        (("objects", "--salt-file", "/none"), "--salt-file /none"),
        (("objects", "--salt-file", os.devnull), "--tenant none"),
        (("objects", "--tier", "disk"), "--tier"),
        (("quota",), ""),
        (("quota", "set", "1GiB"), "Name the tenant by --salt-file or --tenant"),
        (("quota", "set", "much", "--tenant", "none"), "'much' is not a size"),
        (("quota", "set", "99999999TiB", "--tenant", "none"), "larger than any store"),
        (("pin",), "neither of them was given"),
        (("pin", "--tokens", "1", "--keys", "00" * 32), "not by both"),
        (("evict", "--keys", "ab"), "is no chunk key"),
        (("prefetch",), "neither of them was given"),
        (("clear",), "Say what to drop"),
        (("clear", "--all", "--tenant", RED), "Say what to drop"),
    ],
)
def test_wrong_usage_says_what_is_wrong(programs, capsys, argv, told):
    code = app.main([*argv, "--address", programs[0].address] if argv != ("quota",) else list(argv))
    printed = capsys.readouterr()
    assert told in printed.err
    assert code == (app.USAGE if told else app.OK)
    assert "Traceback" not in printed.err
