from __future__ import annotations

import json

import pytest

from kvwire.cli import render
from kvwire.cli.commands.lookup import choose_namespace
from kvwire.cli.commands.status import print_status
from kvwire.cli.connect import ClientSettings
from kvwire.errors import ConfigError
from kvwire.keys import Namespace
from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import cache_service_pb2 as cache
from kvwire.v1 import layout_pb2, namespace_pb2, transfer_pb2

SALT = "tenant-secret"


def full_status():
    reply = admin.GetStatusResponse(
        header=cache.ResponseHeader(incarnation=b"\x01\x02"),
        server_version="0.1.0",
        server_id="host-1",
        addresses=["unix:/run/kvwire.sock"],
        data_paths=[transfer_pb2.DATA_PATH_SHM, transfer_pb2.DATA_PATH_UCX_LOCAL],
        sessions=3,
    )
    reply.started_at.FromJsonString("2026-01-02T03:04:05Z")
    reply.chunk_size.chunk_size = 256
    reply.chunk_size.bound_by = "vllm scheduler"
    reply.chunk_size.binders.add(name="telemetry", bound=False)
    reply.memory.capacity_bytes = 2**34
    reply.memory.used_bytes = 2**33
    reply.memory.quarantined_bytes = 4096
    reply.counters.asked_tokens = 5120
    reply.counters.hit_tokens = 3328
    reply.counters.paths.add(path=transfer_pb2.DATA_PATH_SHM, stored_bytes=2**30)
    client = reply.registrations.add(
        registration_id=2**63, client_name="worker 0", role=cache.CLIENT_ROLE_WORKER, path=99
    )
    client.idle.FromMilliseconds(1500)
    namespace = namespace_pb2.Namespace(model="m", layout_fingerprint=b"\xab\xcd")
    layout = layout_pb2.KvLayout(world_size=1)
    layout.groups.add(kind=layout_pb2.KV_GROUP_KIND_FULL_ATTENTION, num_layers=32)
    reply.namespaces.add(namespace=namespace, layout=layout, registrations=2)
    return reply


def test_messages_become_plain_json():
    told = render.plain(full_status())
    assert told["header"] == {"incarnation": "0102"}
    assert told["started_at"] == "2026-01-02T03:04:05Z"
    assert told["data_paths"] == ["shm", "ucx-local"]
    assert told["memory"]["capacity_bytes"] == 2**34
    assert told["memory"]["reserved_bytes"] == 0
    assert told["registrations"][0]["registration_id"] == 2**63
    assert told["registrations"][0]["role"] == "worker"
    assert told["registrations"][0]["idle"] == 1.5
    assert told["namespaces"][0]["layout"]["groups"][0]["kind"] == "full-attention"
    assert "leases" not in told
    json.dumps(told)


def test_bl64_a_number_of_a_newer_enum_is_shown_as_such():
    assert render.plain(full_status())["registrations"][0]["path"] == "99"


def test_status_for_people(capfd):
    reply = full_status()
    reply.tasks.add(name="sweeper", running=False, error="ValueError: x")
    print_status(reply)
    shown = capfd.readouterr().out
    for told in (
        "host-1, serving",
        "256 tokens",
        "not taken over by: telemetry",
        "8 GiB of 16 GiB (50%)",
        "4 KiB quarantined",
        "65.0% of 5120 tokens found",
        "1 GiB stored, 0 B retrieved",
        "worker 0",
        "full-attention x32",
        "abcd",
        "the task 'sweeper' died: ValueError: x",
    ):
        assert told in shown, told
    print_status(admin.GetStatusResponse())
    assert "not negotiated yet" in capfd.readouterr().out


def test_status_tells_membership_and_events_as_two_facts(capfd):
    reply = admin.GetStatusResponse()
    reply.events.closed_sequence = 12
    reply.events.held_batches, reply.events.held_bytes, reply.events.dropped_batches = 3, 2048, 5
    for address, registered, reporting in (
        ("one:1", True, True),
        ("two:1", True, False),
        ("xyz:1", False, False),
    ):
        reply.coordinators.add(address=address, registered=registered, reporting=reporting)
    one, two, three = reply.coordinators
    one.acknowledged_sequence = 9
    one.heartbeat_age.FromMilliseconds(1500)
    two.sharing_problem = "chunk size 8"
    three.problem = "nobody answers"
    print_status(reply)
    shown = capfd.readouterr().out
    assert "12 batches told, 3 not arrived everywhere (2 KiB), 5 dropped before" in shown
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in shown.splitlines() if ":1 " in line}
    assert rows == {
        "one:1": "yes arrive 9 1.5 s -",
        "two:1": "yes do not arrive - never chunk size 8",
        "xyz:1": "no do not arrive - never nobody answers",
    }


def test_status_tells_events_that_go_to_kafka(capfd):
    reply = admin.GetStatusResponse()
    reply.coordinators.add(address="one:1", registered=True)
    reply.events.kafka_topic, reply.events.kafka_sequence = "events", 7
    reply.events.kafka_problem = "no broker"
    print_status(reply)
    shown = capfd.readouterr().out
    assert "topic events, 7 batches arrived: no broker" in shown
    assert "by kafka" in shown


def test_status_of_a_server_without_a_fleet_tells_nothing_of_one(capfd):
    print_status(admin.GetStatusResponse())
    shown = capfd.readouterr().out
    assert "coordinator" not in shown
    assert "events" not in shown


class FakeClient:
    def __init__(self, *namespaces):
        self.reply = admin.GetStatusResponse()
        for namespace in namespaces:
            self.reply.namespaces.add(namespace=namespace)

    def status(self, timeout=None):
        return self.reply


ONE = namespace_pb2.Namespace(model="m", revision="r", kv_dtype="bf16", layout_fingerprint=b"1")
OTHER = namespace_pb2.Namespace(model="n", layout_fingerprint=b"2")


@pytest.mark.parametrize(
    ("registered", "given", "expected"),
    [
        ((ONE,), {}, Namespace("m", "r", "bf16", b"1")),
        ((ONE,), {"salt": SALT}, Namespace("m", "r", "bf16", b"1", salt=SALT)),
        ((ONE, OTHER), {"model": "n"}, Namespace("n", layout_fingerprint=b"2")),
        ((ONE,), {"model": "m", "adapter": "a"}, Namespace("m", "r", "bf16", b"1", "a")),
        ((ONE,), {"model": "x"}, Namespace("x")),
        ((), {"model": "x"}, Namespace("x")),
        ((ONE,), {"model": "m", "layout_fingerprint": b"9"}, Namespace("m", layout_fingerprint=b"9")),
    ],
)
def test_the_namespace_is_completed_by_the_one_that_fits(registered, given, expected):
    assert choose_namespace(FakeClient(*registered), given, ClientSettings()) == expected


def test_an_open_choice_of_namespaces_is_refused_without_the_salt():
    with pytest.raises(ConfigError, match="these are registered: m, n") as caught:
        choose_namespace(FakeClient(ONE, OTHER), {"salt": SALT}, ClientSettings())
    assert SALT not in str(caught.value)
    with pytest.raises(ConfigError, match="no engine is registered"):
        choose_namespace(FakeClient(), {}, ClientSettings())
