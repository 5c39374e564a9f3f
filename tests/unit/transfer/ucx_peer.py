"""Another process with a UCX engine, for tests: reads commands as JSON lines, answers with JSON lines.

Started by `Child`. Its memory holds bytes of a seeded pattern, so that both sides know what has to arrive.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

CMA_CALLS = {"x86_64": (310, 311), "aarch64": (270, 271)}
SECCOMP_CALL = {"x86_64": 317, "aarch64": 277}


def pattern(seed, nbytes):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Child:
    """The parent's handle. `ask` waits for the answer, `tell` does not."""

    def __init__(self, kind, role="client", device="", block_cma=False):
        self._process = subprocess.Popen(
            [sys.executable, __file__, kind, role, device, "block" if block_cma else ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = bytes.fromhex(self.answer()["address"])
        self.pid = self._process.pid

    def tell(self, **command):
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self):
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"the peer ended with {self._process.wait(10)}")
        return json.loads(line)

    def ask(self, **command):
        self.tell(**command)
        return self.answer()

    def kill(self):
        self._process.kill()
        self._process.wait(10)

    def close(self):
        """Returns the exit status."""
        if self._process.poll() is None:
            self._process.stdin.close()
        status = self._process.wait(20)
        self._process.stdout.close()
        if not self._process.stdin.closed:
            self._process.stdin.close()
        return status


def block_cma():
    """A seccomp filter on all threads: process_vm_readv and process_vm_writev fail with EPERM."""
    load, jump_if, answer = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | 1
    first, second = CMA_CALLS[os.uname().machine]
    program = [(load, 0, 0, 0), (jump_if, 2, 0, first), (jump_if, 1, 0, second), (answer, 0, 0, allow)]
    program.append((answer, 0, 0, refuse))
    code = b"".join(struct.pack("<HBBI", *each) for each in program)
    buffer = ctypes.create_string_buffer(code)
    header = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges: what makes the next call possible for anybody
    assert libc.syscall(SECCOMP_CALL[os.uname().machine], 1, 1, header) == 0


class Server:
    def __init__(self, kind, role, device):
        from kvwire.transfer.ucx import UcxEngine, UcxOptions

        self.engine = UcxEngine(UcxOptions(kind, role, devices=(device,) if device else ()))
        self.peer = None
        self.ops = []

    def connect(self, address):
        self.peer = self.engine.connect(bytes.fromhex(address), "parent")
        return {}

    def send(self, tag, nbytes, seed, wait=True):
        self.ops.append(self.peer.send(tag, pattern(seed, nbytes)))
        return self.wait() if wait else {}

    def recv(self, tag, nbytes, seed, wait=True):
        from kvwire.transfer.memory import anonymous

        buffer = anonymous(nbytes)
        self.ops.append(self.engine.recv(tag, buffer, self.peer))
        if not wait:
            return {}
        reply = self.wait()
        return reply if "error" in reply else {"same": bool((buffer == pattern(seed, nbytes)).all())}

    def wait(self):
        try:
            while self.ops:
                self.ops.pop(0).ending.result(20)
        except Exception as error:  # noqa: BLE001
            return {"error": f"{type(error).__name__}: {error}"}
        return {}

    def probe(self, tag, nbytes, timeout):
        from kvwire.errors import KvwireError
        from kvwire.transfer.ucx_probe import probe_client

        try:
            probe_client(self.engine, self.peer, tag, nbytes, timeout)
        except KvwireError as error:
            return {"error": str(error)}
        return {}

    def sleep(self, seconds):
        time.sleep(seconds)
        return {}

    def block_cma(self):
        block_cma()
        return {}

    def close(self):
        self.engine.close()
        return {}


def main():
    kind, role, device, block = sys.argv[1:]
    if block:
        block_cma()
    server = Server(kind, role, device)
    print(json.dumps({"address": server.engine.address.hex()}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(server, command.pop("do"))(**command)), flush=True)
    server.engine.close()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
