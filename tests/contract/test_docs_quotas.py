"""Every command that docs/quotas.md shows is run, in its order, and prints what stands there."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import struct
import subprocess
from pathlib import Path

import pytest

from kvwire.cli import app
from kvwire.serving import intents
from kvwire.v1.coordinator_service_pb2 import GetIntentsRequest
from support.coordinator_process import FAST, coordinator_process
from support.raw_client import RawClient, tokens
from support.server_process import server_process
from support.tools import grpcurl_path
from support.waiting import eventually

PAGE = (Path(__file__).parents[2] / "docs/quotas.md").read_text()
SALT = "tenant a's own secret"
CHUNK = 256
VARIES = re.compile(r'"incarnation": "[^"]*"')
SERVER, COORDINATOR = "127.0.0.1:7470", "127.0.0.1:7570"


def sessions(page: str) -> list[tuple[str, str]]:
    """Commands with what they print."""
    blocks = re.findall(r"^```\n(\$ .*?)^```$", page, re.MULTILINE | re.DOTALL)
    shown = (part for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:])
    return [(line, printed) for line, _, printed in (part.partition("\n") for part in shown)]


def write_prompt(file: Path, packed: bytes) -> None:
    file.write_text(json.dumps(struct.unpack(f"<{len(packed) // 4}I", packed)))


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """`shell(line)`: what it prints, with the addresses of the page."""
    folder = tmp_path_factory.mktemp("s")
    (folder / "tenant-a.salt").write_text(SALT)
    write_prompt(folder / "system-prompt.json", tokens(3, chunk_size=CHUNK))
    write_prompt(folder / "prompt.json", tokens(2, seed=9, chunk_size=CHUNK))
    with (
        coordinator_process(
            folder, *FAST, f"--state={folder / 'fleet'}", listen="127.0.0.1:0"
        ) as coordinator,
        server_process(
            folder,
            "--policy=tenant",
            f"--state={folder / 'state'}",
            f"--l2=file://{folder / 'kv'}?size=100GiB",
            f"--coordinator={coordinator.address}",
            listen="127.0.0.1:0",
        ) as server,
    ):
        client = RawClient(server.channel())
        client.namespace.model = "my-model"
        client.register()
        client.store("a", tokens(3, chunk_size=CHUNK), salt=SALT)
        client.store("b", tokens(2, seed=9, chunk_size=CHUNK))
        eventually(lambda: client.status().tiers[0].chunks == 5)
        # A coordinator cannot hash tokens before it knows the chunk size.
        eventually(lambda: client.status().coordinators[0].registered)
        addresses = {SERVER: server.address, COORDINATOR: coordinator.address}

        def run(line: str) -> str:
            everywhere = COORDINATOR in line
            for shown, real in addresses.items():
                line = line.replace(shown, real)
            program, *words = shlex.split(line)
            with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
                patch.setenv("KVWIRE_ADDRESS", server.address)
                printed = kvwire(words) if program == "kvwire" else grpcurl(words)
            if everywhere:
                revision = coordinator.stub().GetIntents(GetIntentsRequest()).revision
                eventually(lambda: f"revision {revision}," in server.output())
            lines = VARIES.sub('"incarnation": "..."', printed).splitlines()
            return "".join(f"{each.rstrip()}\n" for each in lines)

        yield run


def kvwire(words: list[str]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        app.main(words)
    return printed.getvalue()


def grpcurl(words: list[str]) -> str:
    done = subprocess.run([grpcurl_path(), *words], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout + done.stderr


@pytest.mark.timeout(180)
def test_every_command_prints_what_the_page_shows(shell):
    found = sessions(PAGE)
    assert len(found) > 15
    for line, printed in found:
        assert shell(line) == VARIES.sub('"incarnation": "..."', printed), line


def test_the_numbers_are_the_codes():
    assert f"{intents.MAX_QUOTAS:,} are possible" in PAGE
