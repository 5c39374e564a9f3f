"""Engines in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("engine_process.py")


class EngineProcess:
    """Runs `engine_process.py`, after `prefix`: one line of JSON in, one out."""

    def __init__(self, model, transfer, *, prefix=(), **options):
        self._process = subprocess.Popen(
            [*prefix, sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=os.environ | {"no_proxy": "*"},
        )
        self._tell({"model": model, "transfer": transfer, "options": options})

    def start(self):
        assert self._hear() == "ready"

    def run(self, *prompts):
        self._tell(list(prompts))
        return self._hear()

    def tell(self, *prompts):
        """Run them, and do not wait for it."""
        self._tell(list(prompts))

    def kill(self):
        self._process.kill()

    def end(self, timeout=60):
        """Its exit status, when it ends by itself."""
        return self._process.wait(timeout)

    def close(self):
        if self._process.poll() is not None:
            self._process.stdin.close()
            self._process.stdout.close()
            return
        self._process.stdin.close()
        try:
            assert self._process.wait(60) == 0
        finally:
            self._process.kill()
            self._process.stdout.close()

    def _tell(self, what):
        self._process.stdin.write(json.dumps(what) + "\n")

    def _hear(self):
        while line := self._process.stdout.readline():
            if line.startswith("> "):
                return json.loads(line[2:])
        raise EOFError(f"the engine ended with {self._process.wait(10)}")
