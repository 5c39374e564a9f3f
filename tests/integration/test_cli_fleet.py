"""`kvwire members | locate | events | blend` against a real coordinator and a real server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from array import array

import pytest

from kvwire.cli import app
from kvwire.cli.bench.prompts import Prompts
from kvwire.cli.commands import members
from kvwire.client import Client
from kvwire.v1 import coordinator_service_pb2 as pb
from support.coordinator_process import FAST, coordinator_process
from support.fleet_member import Member, store
from support.server_process import environment, server_process
from support.waiting import eventually

LENGTH = 1024


@pytest.fixture
def fleet(short_tmp):
    """(coordinator, server, file of a stored prompt)"""
    with (
        coordinator_process(short_tmp, *FAST, "--enable-blend-lookup") as coordinator,
        server_process(
            short_tmp,
            f"--coordinator={coordinator.address}",
            "--server-id=one",
            "--enable-blend-lookup",
            "--blend-deadline=2",
        ) as server,
        Client(server.address) as client,
    ):
        tokens = array("I")
        tokens.frombytes(Prompts(client).stored(LENGTH).tokens)
        file = short_tmp / "prompt.json"
        file.write_text(json.dumps(list(tokens)))
        yield coordinator, server, str(file)


@pytest.fixture
def run(capsys):
    def call(program, *argv):
        assert app.main([*argv, "--address", program.address]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return call


def test_each_command_for_people_and_for_programs(fleet, run):
    coordinator, server, prompt = fleet

    def as_json(*argv):
        return json.loads(run(coordinator, *argv, "--json"))

    def one():
        members = as_json("members")["members"]
        return members and members[0]["placements"] == 4 and members[0]["reporting"] == "current"

    eventually(one)
    (member,) = as_json("members")["members"]
    assert member["server"]["addresses"] == [server.address]
    shown = run(coordinator, "members")
    assert "one" in shown
    assert "current" in shown
    assert "MiB" in shown

    named = ("--tokens-file", prompt, "--namespace-from", server.address)
    found = as_json("locate", *named, "--placements")
    assert (found["asked_chunks"], found["combined_prefix_chunks"]) == (4, 4)
    assert [each["server_id"] for each in found["servers"]] == ["one"]
    shown = run(coordinator, "locate", *named, "--placements")
    assert f"4 chunks, {LENGTH} tokens" in shown
    keys = [each["chunk_key"] for each in found["chunks"]]
    assert all(key in shown for key in keys)
    assert as_json("locate", "--keys", ",".join(keys[:2]))["combined_prefix_chunks"] == 2
    assert {each["chunk_key"] for each in as_json("locate", "--all")["chunks"]} == set(keys)
    assert len(as_json("locate", "--all", "--limit=3")["chunks"]) == 3
    assert "the first 3" in run(coordinator, "locate", "--all", "--limit=3")

    eventually(lambda: as_json("events", "--stats")["blend_chunks"] == 4)
    stats = as_json("events", "--stats")
    assert (stats["keys"], stats["chunk_size"]) == (4, 256)
    assert "4, " in run(coordinator, "events", "--stats")

    for program, flags in ((coordinator, named), (server, ("--tokens-file", prompt, "--server"))):
        matches = json.loads(run(program, "blend", *flags, "--json"))["matches"]
        assert [each["prompt_position"] for each in matches] == [0, 256, 512, 768]
        shown = run(program, "blend", *flags)
        assert "not permission to reuse" in shown
        assert "one (L1 memory)" in shown


def test_events_are_followed_and_a_name_steers_no_terminal(short_tmp, run):
    with (
        coordinator_process(short_tmp, *FAST) as coordinator,
        Member(coordinator, "evil\x1b[2J\n", short_tmp) as member,
    ):
        member.register()
        assert "evil\\x1b[2J\\n" in run(coordinator, "members")
        stop = threading.Event()

        def report():
            while not stop.wait(0.05):
                member.tell(store(1), store(2))

        thread = threading.Thread(target=report)
        thread.start()
        try:
            lines = run(coordinator, "events", "--count=2").splitlines()
            (last,) = run(coordinator, "events", "--count=1", "--json").splitlines()
        finally:
            stop.set()
            thread.join()
    assert len(lines) == 2
    assert "2 stored" in lines[0]
    assert "evil\\x1b[2J\\n" in lines[0]
    assert json.loads(last)["stored_chunks"] == 2


def test_another_program_at_the_address_is_named(fleet, capsys):
    coordinator, server, prompt = fleet
    for argv in (("members",), ("locate", "--all"), ("events", "--stats"), ("events",)):
        assert app.main([*argv, "--address", server.address]) == app.FAILED
        assert f"{server.address} is no coordinator" in capsys.readouterr().err
    argv = ("blend", "--server", "--model=m", "--layout-fingerprint=00", "--tokens-file", prompt)
    assert app.main([*argv, "--address", coordinator.address]) == app.FAILED
    assert f"{coordinator.address} is no cache server" in capsys.readouterr().err


def test_members_are_followed(short_tmp, capsys, monkeypatch):
    with (
        coordinator_process(short_tmp, "--heartbeat=5") as coordinator,
        Member(coordinator, "one", short_tmp) as member,
    ):
        member.register()
        argv = ["members", "--watch", "--address", coordinator.address]
        drawn = iter(range(2))
        monkeypatch.setattr(members, "EVERY_S", 0)
        monkeypatch.setattr(members, "print_members", lambda found: next(drawn))
        # The third drawing ends it.
        with pytest.raises(StopIteration):
            app.main(argv)
        capsys.readouterr()
        command = [sys.executable, "-m", "kvwire.cli", *argv, "--json"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        ) as watching:
            told = [json.loads(watching.stdout.readline()) for _ in range(2)]
            assert told[0]["joined"]["server"]["server_id"] == "one"
            assert told[1] == {"synced": True}
            member.stub.DeregisterServer(
                pb.DeregisterServerRequest(server_id="one", incarnation=member.incarnation)
            )
            assert json.loads(watching.stdout.readline()) == {"left": "one"}
            coordinator.kill()
            assert watching.wait(10) == app.UNREACHABLE
            assert "cannot be reached" in watching.stderr.read()
