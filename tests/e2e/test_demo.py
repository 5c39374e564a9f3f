"""`kvwire demo`, as a user types it: the real model, the real document, each data path."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.leakcheck("shm", "fds")]


@pytest.mark.parametrize(
    "path", ["shm", *(pytest.param(path, marks=pytest.mark.long) for path in ("ucx", "inline"))]
)
def test_the_demo_holds(path):
    if path == "ucx":
        pytest.importorskip("ucxx")
    done = subprocess.run(
        [sys.executable, "-m", "kvwire.cli", "demo", "--path", path, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["output_identical"] is True
    assert found["tokens_from_kvwire"] >= 0.9 * found["prompt_tokens"]
    assert found["problems"] == []
    assert all(name.startswith(path) for name in [*found["stored_bytes"], *found["retrieved_bytes"]])


@pytest.mark.long
def test_the_demo_with_a_fleet_holds():
    """All that B finds comes from A's server: `kvwire demo --fleet` ends with 0 only then."""
    pytest.importorskip("ucxx")
    done = subprocess.run(
        [sys.executable, "-m", "kvwire.cli", "demo", "--fleet", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["output_identical"] is True
    assert found["tokens_from_peer"] == found["tokens_from_kvwire"] >= 0.9 * found["prompt_tokens"]
    assert sum(found["peer_bytes"].values()) > 0
