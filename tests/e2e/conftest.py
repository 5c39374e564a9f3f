from __future__ import annotations

import pytest

from e2e.harness import Baseline, Server, set_environment


def pytest_collection_modifyitems(items):
    for item in items:
        if "e2e" in item.path.parts:
            # vLLM and what it imports warn at import and in use; kvwire's own modules still may not.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.filterwarnings(r"error:::kvwire\..*"))
            item.add_marker(pytest.mark.timeout(180))


@pytest.fixture(autouse=True, scope="session")
def engine_environment():
    set_environment()


@pytest.fixture(scope="session")
def baseline():
    return Baseline()


@pytest.fixture
def serve(short_tmp):
    """Starts a server, with flags of `kvwire server`."""
    servers = []

    def start(*flags):
        servers.append(Server(short_tmp, *flags))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def server(serve):
    return serve()
