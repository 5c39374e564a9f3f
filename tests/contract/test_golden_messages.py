"""Golden messages: two implementations of protobuf read and write them alike."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import json_format, symbol_database

import kvwire.v1.admin_service_pb2
import kvwire.v1.cache_service_pb2
import kvwire.v1.coordinator_service_pb2  # noqa: F401

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "proto" / "testdata"
GOLDEN = json.loads((FOLDER / "messages.json").read_text())["messages"]
NAMES = [each["type"].rpartition(".")[2] for each in GOLDEN]


def test_the_file_is_what_its_program_makes():
    subprocess.run([sys.executable, FOLDER / "make_messages.py", "--check"], check=True, timeout=30)


@pytest.mark.parametrize("golden", GOLDEN, ids=NAMES)
def test_the_stubs_read_and_write_it(golden):
    cls = symbol_database.Default().GetSymbol(golden["type"])
    wire = base64.b64decode(golden["wire"])
    assert json_format.MessageToDict(cls.FromString(wire)) == golden["json"]
    assert json_format.ParseDict(golden["json"], cls()).SerializeToString(deterministic=True) == wire


@pytest.mark.parametrize("golden", GOLDEN, ids=NAMES)
def test_another_implementation_reads_and_writes_it(golden, tmp_path):
    """buf's, which is in Go and reads the schema itself."""
    told, wire = tmp_path / "m.json", tmp_path / "m.bin"
    told.write_text(json.dumps(golden["json"]))
    buf = Path(sys.executable).with_name("buf")
    convert = [buf, "convert", "proto", "--type", golden["type"]]
    subprocess.run([*convert, "--from", told, "--to", wire], check=True, timeout=60, cwd=ROOT)
    # Implementations may order fields differently, so what it wrote is compared by what it means.
    cls = symbol_database.Default().GetSymbol(golden["type"])
    assert json_format.MessageToDict(cls.FromString(wire.read_bytes())) == golden["json"]
    wire.write_bytes(base64.b64decode(golden["wire"]))
    back = subprocess.run(
        [*convert, "--from", wire, "--to", "-#format=json"],
        check=True,
        timeout=60,
        cwd=ROOT,
        capture_output=True,
    )
    assert json.loads(back.stdout) == golden["json"]
