"""Builds the wheel and tries it where a user would: in a fresh environment, without torch, vLLM or UCX.

The editable install of the repository hides packaging mistakes (a folder too many, a portion forgotten):
this is the only check of what is really shipped.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOTS = ("proto/gen", "client", "server", "coordinator")
LIBRARY = ("v1", "errors", "keys", "transfer", "telemetry", "client")

# Runs inside the fresh environment. Modules of optional parts may miss their extra, and nothing else.
IMPORT_ALL = """
import importlib, pkgutil, sys
OPTIONAL = {"torch", "vllm", "ucxx", "transformers", "gguf", "accelerate", "matplotlib", "opentelemetry",
            "confluent_kafka"}
imported, without = 0, []
def fail(name):
    raise
for portion in sys.argv[1:]:
    package = importlib.import_module(f"kvwire.{portion}")
    names = [m.name for m in pkgutil.walk_packages(package.__path__, f"kvwire.{portion}.", onerror=fail)]
    for name in names:
        if name.endswith(".__main__"):
            continue
        try:
            importlib.import_module(name)
            imported += 1
        except Exception as error:
            # What says it in words of its own (the connector, of vLLM) has the missing module as its cause.
            missing = error if isinstance(error, ModuleNotFoundError) else error.__cause__
            if not isinstance(missing, ModuleNotFoundError) or missing.name.split(".")[0] not in OPTIONAL:
                raise
            without.append(f"{name} (needs {missing.name})")
print(f"imported {len(sys.argv) - 1} portions and {imported} modules")
for line in without:
    print("  left out:", line)
"""

RESOURCES = """
from importlib.metadata import distribution
from importlib.resources import files
protos = sorted(f.name for f in files("kvwire.v1").iterdir() if f.name.endswith(".proto"))
assert protos, "the schemas are not in the wheel"
assert files("kvwire.coordinator").joinpath("web", "index.html").is_file(), "no page in the wheel"
assert "Apache License" in distribution("kvwire").read_text("licenses/LICENSE")
print(f"{len(protos)} schema files and the licence are in the wheel")
"""


def portions() -> list[str]:
    return sorted(
        {p.name for root in ROOTS for p in (ROOT / root / "kvwire").iterdir() if any(p.glob("*.py"))}
    )


def build(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT], check=True)
    (wheel,) = folder.glob("kvwire-*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    strangers = [
        n for n in names if not n.startswith(("kvwire/", f"kvwire-{wheel.name.split('-')[1]}.dist-info/"))
    ]
    if strangers:
        sys.exit(f"the wheel holds files outside the namespace: {strangers[:5]}")
    if "kvwire/__init__.py" in names:
        sys.exit("kvwire/__init__.py would close the namespace to its other portions")
    untyped = [p for p in portions() if f"kvwire/{p}/py.typed" not in names]
    if untyped:
        sys.exit(f"no py.typed in {untyped}")
    print(f"{wheel.name}: {len(names)} files, portions {', '.join(portions())}")


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(folder)
        check_contents(wheel)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"

        def inside(*command: str | Path) -> None:
            subprocess.run([python, *command], check=True, cwd=folder)

        inside("-m", "pip", "install", "-q", wheel)
        print("as a client installs it, no extras:", flush=True)
        inside("-W", "error", "-c", IMPORT_ALL, *[p for p in LIBRARY if p in portions()])
        inside("-c", RESOURCES)
        print("with [server,cli]:", flush=True)
        inside("-m", "pip", "install", "-q", f"{wheel}[server,cli]")
        inside("-W", "error", "-c", IMPORT_ALL, *portions())
        subprocess.run([folder / "venv" / "bin" / "kvwire", "--help"], check=True, stdout=subprocess.DEVNULL)
        print("kvwire --help answers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
