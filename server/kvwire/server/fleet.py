"""What this server does for a fleet, put together: journal, memberships, and where events go."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any, Final

from kvwire.client.channel import ChannelConfig, TlsConfig, parse_target
from kvwire.server.intents import FleetIntents
from kvwire.server.journal import Entry, EventKind, Journal, JournalLimits
from kvwire.server.membership import Membership
from kvwire.server.peer import MEMORY
from kvwire.server.reporting.batches import BatchEncoder
from kvwire.serving.listen import read_file
from kvwire.serving.version import server_version
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import event_pb2, namespace_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.server.config import ServerConfig
    from kvwire.server.core import Core
    from kvwire.server.membership import LinkState
    from kvwire.server.reporting.kafka import KafkaReporter
    from kvwire.server.store import Chunk, RemovedChunk, StoredChunk

log = logging.getLogger("kvwire.server")

L1: Final = int(event_pb2.STORAGE_TIER_L1)
MAX_TOKENS_BYTES: Final = 1 << 20
"""Of one chunk. Larger ones are told without their tokens: a batch has to fit into a message."""


class JournalWriter:
    """Writes what the memory tier reports into the journal, as a listener of the store."""

    def __init__(self, journal: Journal, *, with_tokens: bool) -> None:
        self._journal = journal
        self._with_tokens = with_tokens

    def on_stored(self, event: StoredChunk) -> None:
        told = self._with_tokens and len(event.tokens) <= MAX_TOKENS_BYTES
        tokens = event.tokens if told else b""
        self._journal.note(
            Entry(EventKind.STORE, L1, MEMORY, event.key, event.size, tokens, event.parent_key, event.root)
        )

    def on_removed(self, event: RemovedChunk) -> None:
        self._journal.note(Entry(EventKind.DELETE, L1, MEMORY, event.key))

    def on_cleared(self) -> None:
        self._journal.note(Entry(EventKind.CLEAR, L1, MEMORY))

    def on_used(self, chunks: Sequence[Chunk]) -> None:
        self._journal.note_accesses(L1, MEMORY, [chunk.key for chunk in chunks if chunk.announced])


def make_journal(config: ServerConfig, server_id: str, incarnation: bytes) -> Journal | None:
    """None: nobody wants events. Batches are closed by the event loop soon after they were opened."""
    if not config.reports_events:
        return None

    def close_soon() -> None:
        asyncio.get_running_loop().call_later(config.event_interval, journal.close)

    journal = Journal(
        BatchEncoder(server_id, incarnation), close_soon, JournalLimits(held_bytes=config.journal_size)
    )
    return journal


class FleetLinks:
    """All coordinators of one server, by their `channels`. Without any it does nothing."""

    def __init__(
        self, core: Core, channels: Sequence[ChannelConfig], kafka: KafkaReporter | None = None
    ) -> None:
        self._core = core
        self.kafka = kafka
        self.members = [self._member(channel) for channel in channels]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        for member in self.members:
            name = f"kvwire-member of {member.state.address}"
            self._tasks.append(asyncio.get_running_loop().create_task(self._run(member), name=name))
        if self.kafka is not None and self._core.journal is not None:
            self.kafka.start(self._core.journal.reader(), self._core.server_id)
            task = asyncio.get_running_loop().create_task(self.kafka.run(), name="kvwire-kafka")
            self._tasks.append(task)

    async def _run(self, member: Membership) -> None:
        try:
            await member.run()
        except Exception:
            # It serves all the same: a fleet is never worth more than that.
            log.exception("the membership at %s has ended", member.state.address)
            member.state.registered = False
            member.state.problem = "failed inside this server; its log tells more"

    async def leave(self) -> None:
        """No life sign may follow what is said here."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(self._stop_kafka(), *(member.leave() for member in self.members))

    async def _stop_kafka(self) -> None:
        """A server that could not start has nothing to stop."""
        journal = self._core.journal
        if self.kafka is not None and journal is not None and self._tasks:
            journal.close()
            await self.kafka.stop()

    def changed(self) -> None:
        for member in self.members:
            member.changed()

    def stubs(self) -> list[Any]:
        """Of coordinators that this server is a member of."""
        return [member.stub for member in self.members if member.stub is not None]

    def states(self) -> list[tuple[LinkState, int]]:
        """With the last batch that arrived there."""
        return [(each.state, each.reader.acknowledged if each.reader else 0) for each in self.members]

    def facts(self) -> dict[str, Any]:
        """As fields of `ServerState`."""
        journal = self._core.journal
        facts: dict[str, Any] = {
            "registered": {each.state.address: each.state.registered for each in self.members},
            "reporting": {each.state.address: each.state.reporting for each in self.members if each.reader},
        }
        if journal is not None:
            facts["journal_batches"] = journal.held_batches
            facts["journal_bytes"] = journal.held_bytes
            facts["dropped_batches"] = journal.dropped_batches
        return facts

    def _member(self, channel: ChannelConfig) -> Membership:
        core = self._core
        over_rpc = core.journal is not None and core.config.report_events == "grpc"
        reader = core.journal.reader() if core.journal is not None and over_rpc else None
        intents = FleetIntents(str(channel.target), core.pinning, core.quotas)
        watch = core.sharing.watch if core.sharing is not None else None
        return Membership(channel, self._info, self._sign, reader, intents, watch)

    def _info(self) -> pb.ServerInfo:
        core = self._core
        bound = core.binding.bound
        return pb.ServerInfo(
            server_id=core.server_id,
            incarnation=core.incarnation,
            addresses=core.config.advertise or [reachable(address) for address in core.addresses],
            chunk_size=bound.chunk_size if bound else 0,
            digest_function=namespace_pb2.DIGEST_FUNCTION_SHA256,
            capacity_bytes=core.config.l1_size,
            version=server_version(),
            features=[
                *(["blend"] if core.config.enable_blend_lookup else []),
                *(core.sharing.features if core.sharing is not None else []),
            ],
        )

    def _sign(self) -> pb.HeartbeatRequest:
        core = self._core
        status, counters = core.engine.store, core.engine.counters
        used = status.allocator.used
        return pb.HeartbeatRequest(
            server_id=core.server_id,
            incarnation=core.incarnation,
            used_bytes=used,
            last_sequence=core.journal.closed_sequence if core.journal is not None else 0,
            asked_tokens=counters.asked_tokens,
            hit_tokens=counters.hit_tokens,
            tiers=[
                pb.TierUsage(
                    tier=event_pb2.STORAGE_TIER_L1,
                    backend=MEMORY,
                    used_bytes=used,
                    capacity_bytes=core.config.l1_size,
                ),
                *(
                    pb.TierUsage(
                        tier=event_pb2.STORAGE_TIER_L2,
                        backend=tier.name,
                        used_bytes=tier.used_bytes,
                        capacity_bytes=tier.capacity_bytes,
                    )
                    for tier in core.tiers.status()
                ),
            ],
        )


def coordinator_channels(config: ServerConfig) -> list[ChannelConfig]:
    """Raises ConfigError."""
    tls = None
    if config.coordinator_ca or config.coordinator_cert:
        tls = TlsConfig(config.coordinator_ca, config.coordinator_cert, config.coordinator_key)
    token = ""
    if config.coordinator_token_file:
        token = read_file(config.coordinator_token_file, "coordinator_token_file").decode().strip()
    return [ChannelConfig(parse_target(address), tls, token) for address in config.coordinator]


def reachable(address: str) -> str:
    """Where other hosts find a server that listens on every address of its host."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in {"0.0.0.0", "[::]"} else address
