"""Two servers that read from each other's memory, found through a coordinator."""

from __future__ import annotations

import importlib.util

import pytest

from kvwire.v1 import cache_service_pb2 as cache
from support.fleet import fleet
from support.raw_client import content, tokens
from support.waiting import eventually

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed")


@pytest.fixture(params=["ucx-local", "ucx-remote"])
def pair(request, short_tmp):
    """Servers a and b, with one data path between them."""
    with fleet(short_tmp, "a", "b", data_paths=("shm", request.param, "inline")) as made:
        yield made


def test_what_one_server_holds_is_a_hit_at_the_other(pair):
    b = pair.client("b")
    prompt = tokens(6)
    pair.store("a", prompt)
    found = b.lookup("r", prompt)
    assert (found.hit_chunks, found.peer_chunks) == (6, 6)
    b.end_session("r")
    assert b.retrieve("again", prompt) == [content(each) for each in b.keys(prompt)]
    pair.check()
