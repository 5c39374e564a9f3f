"""Generates proto/gen from proto/kvwire, or checks (--check) that it is byte for byte what is committed.

Runs with any Python 3.11; the pinned generator is kept in build/venv-proto and made on first use.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
COMMITTED = PROTO / "gen"
PINS = ROOT / "requirements" / "proto.txt"
TOOLCHAIN = ROOT / "build" / "venv-proto"
HANDWRITTEN = {"py.typed"}


def toolchain() -> Path:
    python = TOOLCHAIN / "bin" / "python"
    stamp = TOOLCHAIN / "installed.txt"
    if stamp.exists() and stamp.read_text() == PINS.read_text():
        return python
    print(f"installing the stub generator into {TOOLCHAIN.relative_to(ROOT)}", flush=True)
    if not python.exists():
        venv.create(TOOLCHAIN, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "-r", PINS], check=True)
    shutil.copyfile(PINS, stamp)
    return python


def sources() -> tuple[list[str], list[str]]:
    """All schema files, and those that declare a service (only they need gRPC stubs)."""
    files = sorted(PROTO.glob("kvwire/**/*.proto"))
    names = [str(f.relative_to(PROTO)) for f in files]
    with_service = [
        name
        for name, file in zip(names, files, strict=True)
        if re.search(r"^service ", file.read_text(), re.MULTILINE)
    ]
    return names, with_service


def generate(out: Path) -> None:
    python = toolchain()
    names, with_service = sources()
    if not names:
        sys.exit(f"no .proto file under {PROTO.relative_to(ROOT)}/kvwire")
    out.mkdir(parents=True, exist_ok=True)
    # The plugins lie beside the generator's python, which need not be on PATH.
    bin_dir = python.parent
    protoc = [
        str(python),
        "-m",
        "grpc_tools.protoc",
        f"--proto_path={PROTO}",
        f"--plugin=protoc-gen-mypy={bin_dir / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={bin_dir / 'protoc-gen-mypy_grpc'}",
    ]
    subprocess.run([*protoc, f"--python_out={out}", f"--mypy_out=quiet:{out}", *names], check=True)
    if with_service:
        grpc_out = [f"--grpc_python_out={out}", f"--mypy_grpc_out=quiet:{out}"]
        subprocess.run([*protoc, *grpc_out, *with_service], check=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(f.relative_to(folder)): f.read_bytes()
        for f in sorted(folder.rglob("*"))
        if f.is_file() and f.name not in HANDWRITTEN and "__pycache__" not in f.parts
    }


def differences(fresh: Path) -> list[str]:
    made, committed = contents(fresh), contents(COMMITTED)
    found = [f"missing: {name}" for name in made.keys() - committed.keys()]
    found += [f"left over: {name}" for name in committed.keys() - made.keys()]
    found += [f"differs: {name}" for name in made.keys() & committed.keys() if made[name] != committed[name]]
    return sorted(found)


def install(fresh: Path) -> None:
    made = contents(fresh)
    for stale in contents(COMMITTED).keys() - made.keys():
        (COMMITTED / stale).unlink()
    for name, data in made.items():
        target = COMMITTED / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != data:
            target.write_bytes(data)
    for package in {(COMMITTED / name).parent for name in made}:
        (package / "py.typed").touch()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with proto/gen, write nothing")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        found = differences(fresh)
        if not check:
            install(fresh)
            print(f"proto/gen: {len(found)} files changed" if found else "proto/gen: nothing changed")
            return 0
    if found:
        print("proto/gen is not what the schemas generate; run `make proto`:", *found, sep="\n  ")
        return 1
    print("proto/gen is what the schemas generate")
    return 0


if __name__ == "__main__":
    sys.exit(main())
