"""A client process that a test stops or kills: it obeys one JSON list per line, `[method, *arguments]`.

    python tests/support/victim.py ADDRESS PATH

It registers, attaches, says so, and then answers each line with one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.raw_client import RawClient, content, tokens
from support.server_process import open_channel


class Victim:
    def __init__(self, address: str, path: str) -> None:
        self.client = RawClient(open_channel(address), engine_id="victim").register(path, attach=True)
        self.ticket = None
        self.data: list[bytes] = []

    def begin(self, seed: int, chunks: int) -> dict:
        """Reserve a prompt's chunks and write one and a half of them."""
        packed = tokens(chunks, seed, self.client.chunk_size)
        asked = self.client.lookup("victim", packed).asked_chunks
        result = self.client.begin_store("victim", 0, asked)
        self.ticket = result.ticket
        keys = self.client.keys(packed)
        self.data = [content(keys[slot.chunk_index], slot.size_bytes) for slot in self.ticket.slots]
        self.write_some()
        return {
            "lease": self.ticket.lease_id,
            "offsets": [slot.arena_offset for slot in self.ticket.slots],
            "being_written": result.being_written,
        }

    def write_some(self) -> None:
        half = len(self.data[0]) * 3 // 2
        if self.client.path == "shm":
            for slot, whole in zip(self.ticket.slots, self.data, strict=True):
                part = whole[: max(0, half)]
                self.client.arena.view(slot.arena_offset, len(part))[:] = part
                half -= len(part)
        else:
            self.client.stub.WriteChunks(self.client.pieces(self.ticket, self.data, half), timeout=10)

    def scribble(self) -> dict:
        """Write into the slots again, as a writer does that was asleep when its lease ended."""
        for slot in self.ticket.slots:
            self.client.arena.view(slot.arena_offset, slot.size_bytes)[:] = b"\xee" * slot.size_bytes
        return {}

    def finish(self) -> dict:
        """The last byte is there, and nobody has been told."""
        self.client.write(self.ticket, self.data)
        return {}

    def arrive(self) -> dict:
        """Tell it on the board."""
        self.client.arrive(self.ticket)
        return {}

    def commit(self) -> dict:
        result = self.client.commit(self.ticket.lease_id)
        return {"committed": result.committed, "reason": result.error.reason, "text": result.error.message}

    def store(self, seed: int, chunks: int) -> dict:
        packed = tokens(chunks, seed, self.client.chunk_size)
        return {"committed": self.client.store("whole", packed)}


def main() -> None:
    victim = Victim(*sys.argv[1:])
    print(json.dumps({"registration": victim.client.registration_id}), flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(json.dumps(getattr(victim, method)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
