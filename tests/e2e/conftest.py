from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

import pytest

from e2e.harness import Baseline, Library, Server, set_up
from e2e.processes import EngineProcess


def pytest_collection_modifyitems(items):
    for item in items:
        if "e2e" in item.path.parts:
            # vLLM and what it imports warn at import and in use; kvwire's own modules still may not.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.filterwarnings(r"error:::kvwire\..*"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(180))


@pytest.fixture(scope="session")
def engine_environment():
    set_up()


@pytest.fixture(scope="session")
def baseline(engine_environment):
    return Baseline()


@pytest.fixture(scope="session")
def library(engine_environment):
    """Servers that hold the shelf of prompts, one for each model: for tests that take nothing away."""
    folder = Path(tempfile.mkdtemp(prefix="kvw-", dir="/tmp"))
    filled = Library(folder)
    yield filled
    filled.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_contained(caplog):
    """The connector keeps its own exceptions from the engine and logs them: no test may cause one."""
    with caplog.at_level(logging.WARNING, "kvwire"):
        yield
    errors = [
        record.getMessage()
        for when in ("setup", "call")
        for record in caplog.get_records(when)
        if record.name.startswith("kvwire") and record.levelno >= logging.ERROR
    ]
    assert not errors


@pytest.fixture
def serve(short_tmp, engine_environment):
    """Starts a server, with flags of `kvwire server`."""
    servers = []

    def start(*flags, **options):
        servers.append(Server(short_tmp, *flags, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def server(serve):
    return serve()


@pytest.fixture
def process():
    running = []

    def start(*args, **options):
        running.append(EngineProcess(*args, **options))
        return running[-1]

    yield start
    for each in running:
        each.close()
