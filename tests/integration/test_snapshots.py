"""PeerService.SnapshotPlacements: what a server holds, at one moment, in pages."""

from __future__ import annotations

import pytest

from kvwire.keys import Namespace, root
from kvwire.server import peer
from kvwire.v1 import event_pb2, peer_service_pb2_grpc
from kvwire.v1 import peer_service_pb2 as pb
from support.local_server import local_server
from support.raw_client import MODEL, OBJECT_BYTES, RawClient, tokens
from support.waiting import eventually

NOBODY = ("127.0.0.1:9",)


def pages(server, **request) -> list[pb.SnapshotPlacementsResponse]:
    stub = peer_service_pb2_grpc.PeerServiceStub(server.channel())
    return list(stub.SnapshotPlacements(pb.SnapshotPlacementsRequest(**request), timeout=10))


@pytest.fixture
def server(short_tmp):
    with local_server(short_tmp, coordinator=NOBODY, server_id="a", enable_blend_lookup=True) as started:
        yield started


def test_an_empty_server_tells_so_in_one_page(server):
    (page,) = pages(server)
    assert (page.server_id, page.incarnation) == ("a", server.core.incarnation)
    assert (page.sequence, list(page.placements)) == (0, [])


def test_pages_have_everything_once_at_one_number(server):
    client = RawClient(server.channel()).register("inline")
    client.store("s", tokens(5))
    found = pages(server, page_size=2, with_tokens=True)
    assert [len(page.placements) for page in found] == [2, 2, 1]
    assert {page.sequence for page in found} == {server.core.journal.closed_sequence}
    assert server.core.journal.closed_sequence > 0
    placed = {each.chunk_key: each for page in found for each in page.placements}
    keys = client.keys(tokens(5))
    assert list(placed) == keys
    for index, key in enumerate(keys):
        each = placed[key]
        assert each.parent_key == (keys[index - 1] if index else b"")
        assert each.namespace_root == root(Namespace(MODEL), 4)
        assert each.tokens == tokens(5)[16 * index : 16 * (index + 1)]
        assert each.size_bytes >= OBJECT_BYTES
    assert all(not each.tokens for page in pages(server) for each in page.placements)


def test_many_tokens_make_a_page_shorter(server, monkeypatch):
    monkeypatch.setattr(peer, "PAGE_BYTES", 20)
    RawClient(server.channel()).register("inline").store("s", tokens(5))
    assert [len(page.placements) for page in pages(server, with_tokens=True)] == [2, 2, 1]
    assert [len(page.placements) for page in pages(server)] == [5]


def test_what_goes_between_two_pages_is_left_out(server):
    client = RawClient(server.channel()).register("inline")
    client.store("s", tokens(40))
    assert server.run(_cleared_between, server) == [1]
    (page,) = pages(server)
    assert not page.placements


async def _cleared_between(server) -> list[int]:
    """The length of each page with something in it, with a Clear after the first."""
    found = []
    request = pb.SnapshotPlacementsRequest(page_size=1)
    async for page in peer.PeerService(server.core).SnapshotPlacements(request, None):
        found.append(len(page.placements))
        server.engine.clear(None)
    return [count for count in found if count]


def test_a_snapshot_tells_what_lies_in_lower_tiers_too(short_tmp):
    settings = {"coordinator": NOBODY, "server_id": "a", "l2": (f"file://{short_tmp}/kv?size=1GiB",)}
    with local_server(short_tmp, **settings) as server:
        client = RawClient(server.channel()).register("inline")
        client.store("s", tokens(5))
        eventually(lambda: client.status().tiers[0].objects == 5)
        found = [each for page in pages(server, page_size=3) for each in page.placements]
        keys = client.keys(tokens(5))
        lower = {each.chunk_key: each for each in found if each.tier == event_pb2.STORAGE_TIER_L2}
        assert [(each.tier, each.chunk_key) for each in found[:5]] == [(1, key) for key in keys]
        assert list(lower) == keys
        for index, key in enumerate(keys):
            each = lower[key]
            assert (each.backend, each.size_bytes) == ("disk", OBJECT_BYTES + 64)
            assert each.parent_key == (keys[index - 1] if index else b"")
            assert each.namespace_root == root(Namespace(MODEL), 4)
