"""vLLM's OpenAI server as a user starts it, on a socket file, and HTTP requests to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from e2e.harness import BLOCK, ENVIRONMENT, NUM_TOKENS
from e2e.models import model_path, tokenizer_path

START_S = 150
REQUEST_S = 60


@dataclass(frozen=True)
class Completion:
    text: str
    cached: int


def words(tokens):
    """What the tokenizer makes of a model's answer."""
    return " ".join(f"w{token}" for token in tokens)


class _Connection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=REQUEST_S)
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class OpenAiServer:
    """`python -m vllm.entrypoints.openai.api_server` in a process group of its own."""

    def __init__(self, folder, model, transfer, *flags):
        self._socket = folder / "openai.sock"
        self._log = folder / "openai.log"
        environment = {name: value for name, value in ENVIRONMENT.items() if "MULTIPROCESSING" not in name}
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", model_path(model), "--tokenizer", tokenizer_path(), "--served-model-name", "tiny"),
            *("--uds", str(self._socket), "--dtype", "float32", "--block-size", str(BLOCK)),
            *("--max-model-len", "512", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(32 << 20)),
            *("--enforce-eager", "--enable-prompt-tokens-details", "--seed", "0"),
            *("--kv-transfer-config", json.dumps(transfer)),
            *flags,
        ]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment, "VLLM_SERVER_DEV_MODE": "1"},
                start_new_session=True,
            )

    def wait_ready(self):
        deadline = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None, self.log()[-4000:]
            assert time.monotonic() < deadline, self.log()[-4000:]
            try:
                self.get("/health")
            except OSError:
                time.sleep(0.2)
            else:
                return

    def get(self, path):
        return self._call("GET", path)

    def post(self, path, body=None):
        return json.loads(self._call("POST", path, body))

    def complete(self, tokens, num_tokens=NUM_TOKENS, **fields):
        """A greedy completion of token ids. Raises unless the server answers with 200."""
        reply = self.post(
            "/v1/completions",
            {
                "model": "tiny",
                "prompt": tokens,
                "max_tokens": num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "skip_special_tokens": False,
                **fields,
            },
        )
        details = reply["usage"].get("prompt_tokens_details") or {}
        return Completion(reply["choices"][0]["text"].strip(), details.get("cached_tokens") or 0)

    def forget(self, how=""):
        """Empty the engine's own prefix cache, which it refuses while something of it is in use."""
        deadline = time.monotonic() + 20
        while not self.post(f"/reset_prefix_cache{how}")["success"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def metric(self, name):
        lines = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        return sum(map(float, lines))

    def log(self):
        return self._log.read_text(errors="replace")

    def kill(self):
        """kill -9, of its engine and workers too."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)

    def close(self):
        """As an operator ends it."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()

    def _call(self, method, path, body=None):
        connection = _Connection(self._socket)
        try:
            connection.request(
                method,
                path,
                json.dumps(body) if body is not None else None,
                {"Content-Type": "application/json"},
            )
            reply = connection.getresponse()
            text = reply.read().decode()
            assert reply.status == 200, f"{reply.status}: {text}"
            return text
        finally:
            connection.close()
