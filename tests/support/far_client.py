"""A client process on another host: it obeys one JSON list per line, `[method, *arguments]`.

    python tests/support/far_client.py '{"address": ..., "data_path": "auto", "deadlines": {...}}'

It registers torch tensors, says over which path, and then answers each line with one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from kvwire.client import Client
from kvwire.errors import KvwireError

BLOCK = 16
BLOCKS = 256
SENTINEL = 0x7F


class FarClient:
    def __init__(self, *, address, data_path="auto", page=64 << 10, layers=2, deadlines=None, heartbeat=0.3):
        self.client = Client(address, client_name="far", deadlines=deadlines)
        self.kv = [torch.zeros(BLOCKS, page, dtype=torch.uint8) for _ in range(layers)]
        self.cache = self.client.register_kv_caches(
            self.kv, model="far", block_size=BLOCK, data_path=data_path, heartbeat_interval=heartbeat
        )

    def path(self):
        return {"path": self.cache.data_path}

    def store(self, seed, blocks):
        """A prompt and its KV, made from the seed, in the first blocks."""
        for layer, right in zip(self.kv, self._right(seed, blocks), strict=True):
            layer[:blocks] = right
        with self.cache.session(prompt(seed, blocks)) as session:
            done = session.store(range(blocks))
        return {"stored": done.stored, "already": done.already_stored, **_outcome(done)}

    def retrieve(self, seed, blocks):
        """Into other memory. `wrong` counts blocks that differ and that nothing has named as failed."""
        for layer in self.kv:
            layer[:] = SENTINEL
        tokens = prompt(seed, blocks)
        with self.cache.session(tokens) as session:
            done = session.retrieve(range(blocks))
            hit = session.hit_tokens // BLOCK
            in_chunk = self.cache.chunk_size // BLOCK
        failed = {chunk for chunk, _ in done.failed}
        good = [block for block in range(hit) if block // in_chunk not in failed]
        right = self._right(seed, blocks)
        pairs = list(zip(self.kv, right, strict=True))
        wrong = [
            block for block in good if not all(torch.equal(has[block], want[block]) for has, want in pairs)
        ]
        return {"hit": hit, "good": len(good), "wrong": len(wrong), **_outcome(done)}

    def healthy(self):
        return {"healthy": self.cache.is_healthy, "why": self.cache.degraded_reason, **self.path()}

    def _right(self, seed, blocks):
        random = torch.Generator().manual_seed(seed)
        return [
            torch.randint(0, 256, (blocks, layer.shape[1]), dtype=torch.uint8, generator=random)
            for layer in self.kv
        ]


def prompt(seed, blocks):
    return range(seed * 1_000_000, seed * 1_000_000 + blocks * BLOCK)


def _outcome(done):
    return {
        "ok": done.ok,
        "failed": len(done.failed),
        "error": type(done.error).__name__ if done.error else "",
    }


def main():
    far = FarClient(**json.loads(sys.argv[1]))
    print(json.dumps(far.path()), flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        began = time.monotonic()
        try:
            answer = getattr(far, method)(*arguments)
        except KvwireError as error:
            answer = {"ok": False, "raised": type(error).__name__, "text": str(error)}
        print(json.dumps({**answer, "seconds": time.monotonic() - began}), flush=True)
    far.cache.close()
    far.client.close()


if __name__ == "__main__":
    main()
