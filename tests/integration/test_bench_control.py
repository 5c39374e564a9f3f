"""`kvwire bench control --quick`: what it reports, never how fast."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from kvwire.cli import app
from kvwire.cli.bench import stats


@pytest.mark.leakcheck("shm", "fds")
def test_control_reports_ratios(capsys):
    assert app.main(["bench", "control", "--quick", "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    fields = {
        *("echo_p50_us", "echo_p99_us", "ping_vs_echo", "lookup_2048_vs_echo", "lookup_131072_vs_echo"),
        "lookups_8192_8callers_vs_echo",
    }
    assert fields <= set(found)
    assert all(found[name] > 0 for name in fields)
    assert found["echo_p50_us"] <= found["echo_p99_us"]
    for length in (2048, 131072):
        both = [found["calls"][f"lookup_{length}_{kind}"]["vs_echo"] for kind in ("hit", "miss")]
        assert found[f"lookup_{length}_vs_echo"] == max(both)
    callers = found["callers"]
    assert found["lookups_8192_8callers_vs_echo"] == min(callers["hit_vs_echo"], callers["miss_vs_echo"])
    assert found["chunk_size"] == 256
    assert "one caller, round 2 of 2" in printed.err


def test_control_for_people(capfd):
    assert app.main(["bench", "control", "--quick"]) == 0
    shown = capfd.readouterr().out
    for told in ("echo of 64 bytes", "lookup 131072 miss", "2 callers", "vs echo"):
        assert told in shown


def test_an_interrupted_benchmark_leaves_no_process_behind(tmp_path):
    bench = subprocess.Popen(
        [sys.executable, "-m", "kvwire.cli", "bench", "control"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what runs in its background with SIGINT ignored, and so would this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads here
    )
    assert bench.stderr is not None
    for line in bench.stderr:
        if "storing" in line:
            break
    children = subprocess.run(["pgrep", "-P", str(bench.pid)], capture_output=True, text=True, check=True)
    bench.send_signal(signal.SIGINT)
    bench.communicate(timeout=30)
    assert bench.returncode == app.INTERRUPTED
    for pid in children.stdout.split():
        assert subprocess.run(["kill", "-0", pid], capture_output=True, check=False).returncode != 0


def test_numbers_out_of_samples():
    assert stats.percentile([1.0], 0.99) == 1.0
    assert stats.percentile(list(range(1, 101)), 0.99) == 99
    assert stats.percentile([3, 1, 2], 0.5) == 2
    assert stats.median_ratio([2, 9, 4], [1, 3, 1]) == 3
    assert stats.microseconds(0.00012344) == 123.4
