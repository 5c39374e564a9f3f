from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.server_process import server_process

EXAMPLE = Path(__file__).parents[2] / "examples" / "notebook_quickstart.py"


def test_the_notebook_runs_from_top_to_bottom(short_tmp):
    pytest.importorskip("torch")
    with server_process(short_tmp, "--chunk-size=64", "--l1-size=64MiB") as server:
        done = subprocess.run(
            [sys.executable, EXAMPLE, server.address], capture_output=True, text=True, check=False, timeout=50
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "chunks of 64 tokens, bytes move over shm",
        "stored 4 chunks, 512 KiB",
        "256 of 256 tokens are cached",
        "retrieved 4 chunks, every byte as it was",
        "same start, other end: 128 tokens",
        "another tenant: 0 tokens",
    ]
