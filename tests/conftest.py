"""What every test may use, and the leak checks.

`@pytest.mark.leakcheck` (or `pytestmark` for a module) fails a test that leaves something behind: entries in
/dev/shm, file descriptors, threads, and for coroutine tests asyncio tasks. Name kinds to check only those:
`leakcheck("shm", "fds")`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import settings

from support import leaks

# No deadline: on a shared machine a slow example says nothing. In CI the same examples every time.
settings.register_profile("kvwire", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("kvwire")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parts = item.path.parts
        if "integration" in parts:
            item.add_marker(pytest.mark.integration)
        if "e2e" in parts:
            item.add_marker(pytest.mark.e2e)
        marker = item.get_closest_marker("leakcheck")
        if marker and "tasks" in leaks.kinds_of(marker) and item.get_closest_marker("asyncio"):
            item.fixturenames.insert(0, "task_leak_check")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("e2e") and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: `make setup` installs the CPU build")
    if item.get_closest_marker("gpu") and not has_accelerator():
        pytest.skip("torch finds no accelerator")


def has_accelerator() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def leak_check(request):
    marker = request.node.get_closest_marker("leakcheck")
    if marker is None:
        yield
        return
    kinds = leaks.kinds_of(marker)
    before = leaks.snapshot(kinds)
    yield
    left = leaks.settle(before, kinds)
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest_asyncio.fixture
async def task_leak_check():
    """Set up before and torn down after all other fixtures of the test, on the test's own loop."""
    before = leaks.tasks()
    yield
    left = await leaks.settle_tasks(before)
    if left:
        pytest.fail("tasks left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture
def short_tmp():
    """A folder with a short path: a socket's path has room for 107 bytes, pytest's own folders are longer."""
    folder = Path(tempfile.mkdtemp(prefix="kvw-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def socket_path(short_tmp):
    return short_tmp / "kvwire.sock"
