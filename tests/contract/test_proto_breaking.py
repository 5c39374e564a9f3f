"""BL-65: the gate stops a change that breaks a client, on the wire or in JSON, and lets additions pass."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUF = Path(sys.executable).parent / "buf"

RESERVED = ("layout.proto", r"uint32 num_layers = 4;", "uint32 num_layers = 4;\n  reserved 100 to 110;")

BREAKING = {
    "field number reused": ("layout.proto", r"uint32 num_layers = 4;", "string label = 4;"),
    "bool to int32": ("admin_service.proto", r"bool complete = ", "int32 complete = "),
    "uint32 to uint64": ("layout.proto", r"uint32 num_layers = 4;", "uint64 num_layers = 4;"),
    "enum value renamed": ("layout.proto", r"KV_GROUP_KIND_RECURRENT = 3", "KV_GROUP_KIND_STATE = 3"),
    "method renamed": ("admin_service.proto", r"rpc GetQuota\(", "rpc ReadQuota("),
    "service renamed": ("admin_service.proto", r"service AdminService", "service OperatorService"),
    "field deleted": ("layout.proto", r"uint32 num_layers = 4;", ""),
}


def schema(folder: Path, *changes: tuple[str, str, str]) -> Path:
    shutil.copytree(ROOT / "proto" / "kvwire", folder / "proto" / "kvwire")
    # buf wants the folders that buf.yaml excludes to be there.
    (folder / "proto" / "gen").mkdir()
    (folder / "proto" / "testdata").mkdir()
    shutil.copyfile(ROOT / "buf.yaml", folder / "buf.yaml")
    for name, pattern, replacement in changes:
        file = folder / "proto" / "kvwire" / "v1" / name
        text, count = re.subn(pattern, replacement, file.read_text(), count=1)
        assert count == 1, f"{name} has no {pattern!r}: renew the planted change"
        file.write_text(text)
    return folder


def breaking(changed: Path, original: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BUF, "breaking", "--against", original], cwd=changed, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("change", BREAKING.values(), ids=BREAKING.keys())
def test_bl65_breaking_changes_are_refused(tmp_path, change):
    result = breaking(schema(tmp_path / "new", change), schema(tmp_path / "old"))
    assert result.returncode == 100, result.stdout + result.stderr
    assert change[0] in result.stdout


def test_bl65_an_added_field_passes(tmp_path):
    added = ("layout.proto", r"uint32 num_layers = 4;", "uint32 num_layers = 4;\n  string hint = 90;")
    result = breaking(schema(tmp_path / "new", added), schema(tmp_path / "old"))
    assert result.returncode == 0, result.stdout


def test_bl65_a_field_deleted_and_reserved_passes(tmp_path):
    gone = ("layout.proto", r"uint32 num_layers = 4;", 'reserved 4;\n  reserved "num_layers";')
    result = breaking(schema(tmp_path / "new", gone), schema(tmp_path / "old"))
    assert result.returncode == 0, result.stdout


def test_bl65_a_reserved_range_may_grow_and_not_shrink(tmp_path):
    """Older releases of buf flagged the harmless widening too; the pinned one does not (see CONTRIBUTING)."""
    old = schema(tmp_path / "old", RESERVED)
    wider = ("layout.proto", "reserved 100 to 110", "reserved 100 to 120")
    assert breaking(schema(tmp_path / "wider", RESERVED, wider), old).returncode == 0

    narrower = ("layout.proto", "reserved 100 to 110", "reserved 100 to 105")
    result = breaking(schema(tmp_path / "narrower", RESERVED, narrower), old)
    assert result.returncode == 100
    assert "reserved range" in result.stdout
