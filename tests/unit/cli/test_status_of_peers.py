from __future__ import annotations

from kvwire.cli.commands.status import print_status
from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import transfer_pb2


def test_other_servers_are_listed_with_what_came_from_them_and_why_one_is_left_out(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    reply = admin.GetStatusResponse(server_id="b")
    sharing = reply.sharing
    sharing.asked_chunks, sharing.located_chunks, sharing.fetched_chunks = 9, 7, 5
    sharing.fallback_chunks, sharing.directory_failures = 2, 1
    sharing.given_leases, sharing.given_bytes = 3, 4 << 20
    sharing.peers.add(
        server_id="a",
        address="10.0.0.1:7470",
        path=transfer_pb2.DATA_PATH_UCX_REMOTE,
        fetched_chunks=5,
        fetched_bytes=5 << 20,
        failed_hints=2,
        failed_transfers=1,
    )
    sharing.peers.add(server_id="c", problem="differs in its chunk size")
    print_status(reply)
    told = capsys.readouterr().out
    for part in (
        "7 of 9 chunks asked for are known elsewhere, 5 fetched, 2 not to be had",
        "1 questions without an answer in time",
        "4 MiB to others, 3 leases",
        "10.0.0.1:7470",
        "ucx-remote",
        "5 MiB",
        "2 hints, 1 transfers",
        "differs in its chunk size",
    ):
        assert part in told, part


def test_a_server_without_a_fleet_tells_of_no_others(capsys):
    print_status(admin.GetStatusResponse(server_id="b"))
    assert "other servers" not in capsys.readouterr().out
