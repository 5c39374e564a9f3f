from __future__ import annotations

import threading
import time

import pytest

from kvwire import errors
from kvwire.client import Client, EventKind, GroupKind, KvGroup, KvLayout, Registration, Role
from kvwire.keys import Namespace
from kvwire.v1 import cache_service_pb2 as pb
from kvwire.v1 import event_pb2
from support.fake_server import fake_server

LAYOUT = KvLayout((KvGroup(GroupKind.FULL_ATTENTION, 4, 2, 64, 2),))

pytestmark = pytest.mark.leakcheck("threads")


@pytest.fixture
def server(socket_path):
    with fake_server(f"unix:{socket_path}") as running:
        yield running


@pytest.fixture
def client(server):
    with Client(server.address, client_name="test") as made:
        yield made


@pytest.fixture
def registered(client):
    what = Registration(b"c" * 16, "e", Role.SCHEDULER, Namespace("m"), LAYOUT, chunk_size=8)
    return client.register(what).registration_id


def test_attach_ends_with_the_registration_and_without_an_error_when_cancelled(server, client, registered):
    stream = client.attach(registered)
    events = iter(stream)
    assert next(events).draining_s is None
    threading.Timer(0.1, stream.cancel).start()
    assert list(events) == []
    events = iter(client.attach(registered))
    next(events)
    threading.Timer(0.1, server.drop_registrations).start()
    with pytest.raises(errors.NotRegistered):
        list(events)


def test_attach_that_is_never_answered_ends(server, registered):
    server.hold["Attach"] = threading.Event()
    with Client(server.address, deadlines={"Attach": 0.2}) as client, pytest.raises(errors.DeadlineExceeded):
        list(client.attach(registered))


def kv_event_replies(*pauses):
    def subscribe(_request, context):
        for sequence, pause in enumerate(pauses, start=1):
            time.sleep(pause)
            if context.is_active():
                event = event_pb2.CacheEvent(kind=event_pb2.CACHE_EVENT_KIND_STORE, chunk_key=b"k" * 32)
                unknown = event_pb2.CacheEvent(chunk_key=b"k" * 32)
                unknown.MergeFromString(b"\x08\x63")  # kind 99
                yield pb.SubscribeKvEventsResponse(sequence=sequence, events=[event, unknown])

    return subscribe


def test_bl64_events_of_an_unknown_kind_do_not_end_the_stream(server, client):
    server.SubscribeKvEvents = kv_event_replies(0, 0)
    server.restart()
    got = list(client.subscribe_kv_events())
    assert [each.sequence for each in got] == [1, 2]
    assert [event.kind for event in got[0].events] == [EventKind.STORE, EventKind.UNKNOWN]


def test_a_stream_that_goes_quiet_ends(server):
    server.SubscribeKvEvents = kv_event_replies(0, 0.2, 0.2, 1.5)
    server.restart()
    with Client(server.address, deadlines={"SubscribeKvEvents": 0.5}) as client:
        got = []
        start = time.monotonic()
        with pytest.raises(errors.DeadlineExceeded, match=r"said nothing for 0\.5 s"):
            got.extend(each.sequence for each in client.subscribe_kv_events())
        assert time.monotonic() - start < 1.5
