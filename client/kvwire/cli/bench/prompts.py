"""Prompts for lookups, stored for real, as messages that are made before anything is timed."""

from __future__ import annotations

import os
import random
import time
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvwire.cli.bench.processes import BenchError
from kvwire.client import (
    Client,
    CommitItem,
    GroupKind,
    KvGroup,
    KvLayout,
    Offer,
    Path,
    Registration,
    Role,
    SessionRange,
    TransferItem,
)
from kvwire.keys import Namespace, pack_tokens
from kvwire.v1 import cache_service_pb2 as pb
from kvwire.v1 import namespace_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

SPAN_TOKENS: Final = 256
OBJECT_BYTES: Final = 64
STORE_CHUNKS: Final = 256
LAYOUT: Final = KvLayout(
    world_size=1,
    groups=(
        KvGroup(
            kind=GroupKind.FULL_ATTENTION,
            span_tokens=SPAN_TOKENS,
            window_tokens=0,
            num_layers=1,
            block_bytes=OBJECT_BYTES,
            blocks_per_object=1,
        ),
    ),
)
"""One tiny object per chunk: what is measured is names and leases, and a hit is a real hit."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens, packed; `hit` says whether they have been stored."""

    tokens: bytes
    hit: bool

    def __len__(self) -> int:
        return len(self.tokens) // 4


class Prompts:
    """A registered client with a namespace of its own, and the prompts that it has stored, the last at
    `stored_at` (perf_counter)."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.namespace = Namespace(model=f"bench-{os.urandom(4).hex()}")
        self.chunk_size = client.negotiate(SPAN_TOKENS).chunk_size
        self.registration_id = client.register(
            Registration(
                client_id=os.urandom(16),
                engine_id="bench",
                role=Role.STANDALONE,
                namespace=self.namespace,
                layout=LAYOUT,
                chunk_size=self.chunk_size,
                client_name="kvwire bench",
                offers=(Offer(Path.INLINE),),
            )
        ).registration_id
        self.stored_at = 0.0
        self._random = random.Random(1)  # noqa: S311 - token ids

    def stored(self, length: int) -> Prompt:
        """A prompt of which every chunk is there."""
        prompt = Prompt(self._tokens(length), hit=True)
        session = f"store-{length}"
        asked = self._lookup(prompt, session).asked_chunks
        for first in range(0, asked, STORE_CHUNKS):
            self._store(session, first, min(STORE_CHUNKS, asked - first))
        self.stored_at = time.perf_counter()
        self.client.end_sessions(self.registration_id, [session])
        found = self._lookup(prompt, session).hit_tokens
        self.client.end_sessions(self.registration_id, [session])
        if found != length:
            raise BenchError(f"{found} of {length} stored tokens were found again.")
        return prompt

    def absent(self, length: int) -> Prompt:
        """A prompt of which nothing is there."""
        return Prompt(self._tokens(length), hit=False)

    def _tokens(self, length: int) -> bytes:
        return pack_tokens(array("I", (self._random.randrange(128_000) for _ in range(length))))

    def _lookup(self, prompt: Prompt, session: str) -> pb.LookupResponse:
        request = lookup_request(self.registration_id, session, self.namespace, prompt)
        reply: pb.LookupResponse = self.client.channel().unary_unary(
            "/kvwire.v1.CacheService/Lookup", pb.LookupRequest.SerializeToString, pb.LookupResponse.FromString
        )(request, timeout=30)
        return reply

    def _store(self, session: str, first: int, count: int) -> None:
        item = TransferItem(SessionRange(session, first, count))
        (grant,) = self.client.begin_store(self.registration_id, [item])
        if grant.ticket is None:
            raise BenchError(f"The server granted no slots: {grant.error}.")
        lease, slots = grant.ticket.lease_id, len(grant.ticket.slots)
        self.client.write_chunks(self._pieces(lease, slots))
        self.client.commit_store(self.registration_id, [CommitItem(lease, tuple(range(slots)))])

    def _pieces(self, lease: int, slots: int) -> Iterator[pb.WriteChunksRequest]:
        for slot in range(slots):
            yield pb.WriteChunksRequest(
                registration_id=self.registration_id, lease_id=lease, slot=slot, data=os.urandom(OBJECT_BYTES)
            )


def lookup_request(
    registration_id: int, session: str, namespace: Namespace, prompt: Prompt
) -> pb.LookupRequest:
    return pb.LookupRequest(
        registration_id=registration_id,
        session_id=session,
        namespace=namespace_pb2.Namespace(model=namespace.model),
        tokens=prompt.tokens,
    )
