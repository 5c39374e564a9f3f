"""What a coordinator remembers over a restart, and that a bad file does no harm."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys

import pytest

from kvwire.coordinator.archive import saved_rows, saved_servers
from kvwire.coordinator.checkpoint import FILE_NAME, ROWS, CheckpointWriter
from kvwire.coordinator.fleet import Fleet, FleetConfig
from kvwire.coordinator.keeping import encode_head, encode_rows, load
from kvwire.coordinator.messages import Tier
from support.fleet_model import L2, FakeServer, chunk

KEYS = [chunk(index) for index in range(100)]


def whole(fleet: Fleet, server: FakeServer, now: float = 0.0) -> None:
    """Register, and fetch its snapshot."""
    fleet.register(server.info, now)
    for pull in fleet.pulls(now):
        if pull.server_id == server.server_id:
            snapshot = server.snapshot()
            fleet.pull_page(pull, snapshot.incarnation, snapshot.sequence, snapshot.placements, now)
            assert fleet.end_pull(pull, now)


def save(fleet: Fleet, path, now: float = 0.0, between=lambda: None, slice_rows: int = 8192) -> None:
    head = encode_head(saved_servers(fleet, now), now, {"kafka": {"0": 17}})
    writer = CheckpointWriter(path)
    writer.head(head)
    for piece in saved_rows(fleet, slice_rows):
        writer.frame(ROWS, encode_rows(piece))
        between()
    writer.finish()


def two_servers() -> tuple[Fleet, list[FakeServer]]:
    fleet, servers = Fleet(), [FakeServer("a"), FakeServer("b")]
    for server in servers:
        whole(fleet, server)
    for index, key in enumerate(KEYS):
        servers[index % 2].store(key, tier=L2 if index < 20 else Tier.L1)
    for server in servers:
        fleet.report(server.close(), 1.0)
    return fleet, servers


def found(fleet: Fleet) -> set[tuple]:
    return {
        (key, each.server_id, each.incarnation, each.tier, each.size_bytes)
        for key, placements in fleet.directory.page(limit=10**6)
        for each in placements
    }


def test_all_is_listed_at_once_and_events_go_on_where_they_were(tmp_path):
    fleet, servers = two_servers()
    save(fleet, tmp_path / FILE_NAME, 5.0)
    again = Fleet()
    assert load(again, tmp_path / FILE_NAME, 100.0) == ("loaded", {"kafka": {"0": 17}})
    again.directory.check_integrity()
    assert found(again) == found(fleet)
    assert again.locate(KEYS).combined == 0
    assert again.views(100.0) == []
    (placement,) = again.directory.placements(KEYS[0])
    assert 100.0 - placement.since == pytest.approx(4.0, abs=2)
    for server in servers:
        assert again.register(server.info, 101.0).next_sequence == 2
    assert again.pulls(101.0) == []
    assert again.locate(KEYS).combined == len(KEYS)
    servers[0].delete(KEYS[50])
    again.report(servers[0].close(), 102.0)
    assert not again.directory.holds(KEYS[50])
    assert again.stats.gaps == 0


def test_a_checkpoint_has_no_tokens_so_a_blend_index_asks_for_them(tmp_path):
    fleet, servers = two_servers()
    save(fleet, tmp_path / FILE_NAME)
    again = Fleet(FleetConfig(blend_bytes=1 << 20))
    load(again, tmp_path / FILE_NAME, 0.0)
    for server in servers:
        again.register(server.info, 1.0)
    assert again.locate(KEYS).combined == len(KEYS)
    assert {pull.server_id for pull in again.pulls(1.0)} == {"a", "b"}


def test_a_server_that_told_more_since_is_asked(tmp_path):
    fleet, servers = two_servers()
    save(fleet, tmp_path / FILE_NAME)
    server = servers[0]
    server.delete(KEYS[50])
    fleet.report(server.close(), 2.0)
    again = Fleet()
    load(again, tmp_path / FILE_NAME, 0.0)
    again.register(server.info, 0.0)
    for now in range(1, 12):
        again.heartbeat("a", server.incarnation, float(now), last_sequence=server.sequence)
        again.tick(float(now))
    assert [pull.server_id for pull in again.pulls(12.0)] == ["a"]


def test_a_server_that_restarted_has_only_its_l2(tmp_path):
    fleet, servers = two_servers()
    save(fleet, tmp_path / FILE_NAME)
    again = Fleet()
    load(again, tmp_path / FILE_NAME, 0.0)
    servers[0].run += 1
    again.register(servers[0].info, 0.0)
    assert {each[3] for each in found(again) if each[1] == "a"} == {Tier.L2}
    assert [pull.server_id for pull in again.pulls(0.0)] == ["a"]


def test_servers_that_do_not_come_back_are_lost_as_ever(tmp_path):
    fleet, _ = two_servers()
    save(fleet, tmp_path / FILE_NAME)
    again = Fleet(FleetConfig(keep_l2=1000))
    load(again, tmp_path / FILE_NAME, 0.0)
    again.tick(29.0)
    assert len(found(again)) == 100
    again.tick(31.0)
    assert {each[3] for each in found(again)} == {Tier.L2}
    save(again, tmp_path / FILE_NAME, 531.0)
    third = Fleet(FleetConfig(keep_l2=1000))
    load(third, tmp_path / FILE_NAME, 0.0)
    third.tick(490.0)
    assert len(found(third)) == 20
    third.tick(510.0)
    assert found(third) == set()


def test_what_happens_while_it_is_written_comes_out_right_when_told_again(tmp_path):
    chance = random.Random(3)
    for _ in range(20):
        fleet, servers = two_servers()
        since = []

        def churn(fleet=fleet, servers=servers, since=since) -> None:
            for server in servers:
                for _ in range(6):
                    key = chance.choice(KEYS)
                    if chance.random() < 0.5:
                        server.store(key, chance.randint(1, 9))
                    elif (Tier.L1, key) in server.held:
                        server.delete(key)
                since.append(server.close())
                fleet.report(since[-1], 2.0)
                fleet.sweep()

        save(fleet, tmp_path / FILE_NAME, between=churn, slice_rows=10)
        again = Fleet()
        load(again, tmp_path / FILE_NAME, 0.0)
        for server in servers:
            again.register(server.info, 0.0)
        assert again.pulls(0.0) == []
        for batch in since:
            again.report(batch, 1.0)
        again.directory.check_integrity()
        assert found(again) == found(fleet)


def test_a_damaged_file_is_a_cold_start_with_one_line(tmp_path, caplog):
    fleet, _ = two_servers()
    path = tmp_path / FILE_NAME
    save(fleet, path)
    content = path.read_bytes()
    bad = [content[: len(content) * part // 20] for part in range(20)]
    for position in random.Random(1).sample(range(len(content)), 150):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        bad.append(bytes(flipped))
    bad += [b"kvwire checkpoint 2\n" + content[20:], content + b"x", os.urandom(5000)]
    for damaged in bad:
        path.write_bytes(damaged)
        caplog.clear()
        again = Fleet()
        with caplog.at_level(logging.WARNING):
            assert load(again, path, 0.0) == ("damaged", {})
        assert len(caplog.records) == 1
        assert found(again) == set()
    path.unlink()
    assert load(Fleet(), path, 0.0) == ("cold", {})
    path.mkdir()
    assert load(Fleet(), path, 0.0)[0] == "damaged"


def test_a_writer_that_does_not_finish_leaves_the_former_file(tmp_path):
    fleet, _ = two_servers()
    path = tmp_path / FILE_NAME
    save(fleet, path)
    writer = CheckpointWriter(path)
    writer.head({})
    assert load(Fleet(), path, 0.0)[0] == "loaded"
    writer.abandon()
    assert load(Fleet(), path, 0.0)[0] == "loaded"


VICTIM = """
import sys
from pathlib import Path
from kvwire.coordinator.checkpoint import ROWS, CheckpointWriter
from kvwire.coordinator.keeping import encode_head

while True:
    writer = CheckpointWriter(Path(sys.argv[1]))
    writer.head(encode_head([], 0.0, {"filled": "x" * 200000}))
    writer.finish()
    print("written", flush=True)
"""


def test_killed_while_it_writes_the_former_one_stays(tmp_path):
    path = tmp_path / FILE_NAME
    for writes in (1, 3, 8):
        victim = subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(writes):
            assert victim.stdout.readline() == "written\n"
        victim.kill()
        victim.stdout.close()
        victim.wait(10)
        assert load(Fleet(), path, 0.0)[0] == "loaded"
