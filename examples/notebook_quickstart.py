"""kvwire in a few lines, cell by cell, with torch tensors on a CPU.

Start a server in a terminal, then run the cells (or this file):

    kvwire server --listen unix:/tmp/kvwire.sock --l1-size 256MiB --chunk-size 64
    python examples/notebook_quickstart.py unix:/tmp/kvwire.sock
"""

# ruff: noqa: S101, T201 - it prints, and checks what it prints

# %% Connect
from __future__ import annotations

import sys

import torch

from kvwire.client import Client

address = sys.argv[1] if len(sys.argv) > 1 else "unix:/tmp/kvwire.sock"
client = Client(address, client_name="notebook")

# %% Register the KV caches: one tensor per layer, blocks first. This negotiates the chunk size on the way.
kv_caches = {f"layer.{i}": torch.randn(128, 2, 16, 64) for i in range(4)}  # 128 blocks of 16 tokens
cache = client.register_kv_caches(kv_caches, model="my-model", block_size=16)
print(f"chunks of {cache.chunk_size} tokens, bytes move over {cache.data_path}")

# %% Store a prompt whose KV lies in blocks 0 to 15
prompt = list(range(1000, 1256))
with cache.session(prompt) as session:
    stored = session.store(range(16))
print(f"stored {stored.stored} chunks, {stored.stored_bytes >> 10} KiB")

# %% Look it up again, and load it into other blocks
with cache.session(prompt) as session:
    print(f"{session.hit_tokens} of {len(prompt)} tokens are cached")
    loaded = session.retrieve(range(100, 116))
assert loaded.ok, loaded.error
assert all(torch.equal(layer[100:116], layer[:16]) for layer in kv_caches.values())
print(f"retrieved {loaded.retrieved} chunks, every byte as it was")

# %% Prompts are found by their prefix; a tenant's salt keeps them apart
with cache.session([*prompt[:128], 7, 7, 7]) as session:
    print(f"same start, other end: {session.hit_tokens} tokens")
with cache.session(prompt, salt="another tenant") as session:
    print(f"another tenant: {session.hit_tokens} tokens")

# %% Leave
cache.close()
client.close()
