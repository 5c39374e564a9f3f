from __future__ import annotations

import pytest

from support.local_server import local_server
from support.raw_client import RawClient
from support.server_process import server_process


@pytest.fixture
def server(short_tmp):
    """A `kvwire server` process on a socket file, small chunks, stopped and checked at the end."""
    with server_process(short_tmp, "--chunk-size=4", "--sweep-interval=0.1") as started:
        yield started


@pytest.fixture
def client(server):
    made = RawClient(server.channel())
    yield made
    made.let_go()


@pytest.fixture
def local(short_tmp):
    """The server inside the test's process: a test may look into it, and break it."""
    with local_server(short_tmp) as started:
        yield started


@pytest.fixture
def local_client(local):
    made = RawClient(local.channel())
    yield made
    made.let_go()
