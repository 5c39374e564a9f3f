"""`kvwire bench tier --quick`: what it reports and what it refuses, never how fast."""

from __future__ import annotations

import json
import os

import pytest

from kvwire.cli import app

RATIOS = ("write_vs_file_copy", "read_vs_file_copy")
SPEEDS = ("write_gb_s", "read_gb_s", "file_copy_gb_s")


def bench(*argv):
    return app.main(["bench", "tier", "--quick", "--size", "64MiB", "--rounds", "1", *argv])


@pytest.mark.leakcheck("shm")
def test_folder_and_other_stores_report_verified_ratios(capfd, tmp_path):
    url = "memory://?size=256MiB"
    assert bench("--folder", str(tmp_path), "--url", url, "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert list(found["stores"]) == ["folder", "memory://"]
    for sizes in found["stores"].values():
        (each,) = sizes.values()
        assert each["verified"] is True
        assert each["rounds"] == 1
        assert all(each[name] > 0 for name in (*RATIOS, *SPEEDS))
    (local,) = found["stores"]["folder"].values()
    assert {name: found[name] for name in RATIOS} == {name: local[name] for name in RATIOS}
    assert found["encrypted"] is False
    assert list(tmp_path.iterdir()) == []


def test_a_table_of_what_is_encrypted(capfd, tmp_path):
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)
    assert bench("--key-file", str(key)) == 0
    shown = capfd.readouterr().out
    assert "encrypted at rest" in shown
    assert "write vs file copy" in shown
    assert "every byte compared" in shown


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (("--size", "32MiB"), "32MiB"),
        (("--size", "100MiB"), "100MiB"),
        (("--folder", "/nowhere/at/all"), "/nowhere/at/all"),
        (("--url", "ftp://x?size=1GiB"), "ftp"),
    ],
)
def test_what_cannot_be_measured_is_refused(argv, problem, capfd):
    assert app.main(["bench", "tier", "--quick", "--size", "64MiB", *argv]) != 0
    shown = capfd.readouterr().err
    assert problem in shown
    assert "Traceback" not in shown
