"""`kvwire bench transfer --quick`: what it reports and what it refuses, never how fast."""

from __future__ import annotations

import json

import pytest

from kvwire.cli import app
from kvwire.cli.bench import report
from kvwire.cli.bench.blocks import BLOCK_BYTES, BLOCK_TOKENS, PagedKv
from kvwire.cli.bench.processes import BenchError
from kvwire.cli.bench.raw_socket import raw_socket

RATIOS = ("store_vs_memcpy", "retrieve_vs_memcpy")
SPEEDS = ("store_gb_s", "retrieve_gb_s", "memcpy_gb_s")


def bench(*argv):
    return app.main(["bench", "transfer", "--quick", *argv])


@pytest.mark.parametrize(
    ("path", "memory"),
    [
        ("shm", "numpy"),
        ("shm", "torch"),
        ("ucx-local", "torch"),
        ("ucx-remote", "numpy"),
        ("inline", "numpy"),
    ],
)
@pytest.mark.leakcheck("shm")
def test_every_path_reports_verified_ratios(path, memory, capsys):
    if memory == "torch":
        pytest.importorskip("torch")
    assert bench("--path", path, "--size", "32MiB", "--memory", memory, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"]["layers"] == 32
    assert found["layout"]["chunk_tokens"] == 256
    (reports,) = found["paths"].values()
    if "skipped" in reports:
        pytest.skip(reports["skipped"])
    (each,) = reports.values()
    assert each["path"] == path
    assert each["verified"] is True
    assert all(each[name] > 0 for name in (*RATIOS, *SPEEDS))
    assert ("vs_raw_socket" in each) == (path == "ucx-remote")


def test_a_table_and_a_chart(capfd, tmp_path):
    pytest.importorskip("matplotlib")
    chart = tmp_path / "paths.png"
    assert bench("--path", "shm", "--size", "32MiB", "--plot", str(chart)) == 0
    shown = capfd.readouterr().out
    assert "store vs memcpy" in shown
    assert "every byte compared" in shown
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_a_skipped_path_is_shown_with_its_reason(capfd):
    report.print_transfer({"paths": {"ucx-local": {"skipped": "pip install 'kvwire[ucx-cu12]'"}}})
    assert "kvwire[ucx-cu12]" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--path", "pigeon"), "--path pigeon: the paths are shm, ucx-local"),
        (("--size", "33MiB"), "--size 33MiB is no multiple of a chunk, 32MiB"),
        (("--size", "much"), "--size 'much' is not a size"),
        (("--memory", "tape"), "--memory"),
    ],
)
def test_wrong_usage(argv, told, capsys):
    assert bench(*argv) == app.USAGE
    assert told in capsys.readouterr().err


def test_moved_means_every_byte_of_every_layer():
    kv = PagedKv(4, "numpy")
    assert kv.size_bytes == 4 * BLOCK_BYTES
    assert kv.num_tokens == 4 * BLOCK_TOKENS
    assert len(kv.fresh_tokens()) == 4 * kv.num_tokens
    stored, retrieved = [2, 0, 1, 3], [1, 3, 0, 2]
    for out, into in zip(stored, retrieved, strict=True):
        kv.blocks[:, into] = kv.reference[:, out]
    assert kv.is_moved(stored, retrieved)
    assert not kv.is_moved(retrieved, stored)
    kv.blocks[31, 2, -1] ^= 1
    assert not kv.is_moved(stored, retrieved)


def test_the_raw_socket_moves_everything_and_ends():
    data = memoryview(bytes(range(256)) * 4096)
    with raw_socket(len(data)) as send:
        assert send(data) > 0
        assert send(data) > 0
    with pytest.raises(BenchError), raw_socket(len(data)) as send:
        raise BenchError("the benchmark failed")
