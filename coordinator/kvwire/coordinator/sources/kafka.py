"""Events from a Kafka topic. Every coordinator reads all partitions, so there is no group to balance.

Without offsets of a checkpoint it begins at the end of the topic. What was before is in the snapshots of the
members; a batch between a snapshot and that end shows as a gap, or as silence, and heals by another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from google.protobuf.message import DecodeError

from kvwire.coordinator.sources.waiting_room import WaitingRoom
from kvwire.errors import ConfigError, InvalidArgument, MissingExtra, ServerNotRegistered, TooManyItems
from kvwire.v1 import event_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvwire.coordinator.core import Core

T = TypeVar("T")
log = logging.getLogger("kvwire.coordinator")

_POLL_S: Final = 0.1
_RECORDS: Final = 500
_METADATA_S: Final = 2.0
_LOOK_S: Final = 30.0
_RETRY_S: Final = 1.0
_STOP_S: Final = 2.0
_TELL_S: Final = 2.0
_LOG_S: Final = 30.0


class KafkaSource:
    """A part of the coordinator. `problem` is empty while records can come in."""

    def __init__(self, core: Core) -> None:
        """Raises MissingExtra, ConfigError."""
        self._core = core
        self._topic = core.config.kafka_topic
        self._client, self._consumer = _consumer(core.config, self._on_error)
        self._thread = ThreadPoolExecutor(1, "kvwire-kafka")
        self._room = WaitingRoom()
        # Which run of a server was the member when its first record in the room was refused.
        self._refused_for: dict[str, bytes] = {}
        self._offsets: dict[int, int] = {}
        self._looked = False
        self._look_at = 0.0
        self._tell_at = 0.0
        self._logged_at = -_LOG_S
        self.problem = ""
        self.bad_records = 0

    @property
    def skipped_records(self) -> int:
        return self._room.skipped

    def offsets(self) -> dict[str, int]:
        """By partition, the next record to read."""
        return {str(partition): offset for partition, offset in self._offsets.items()}

    async def start(self) -> None:
        core = self._core
        restored = core.restored_extra.get("kafka") or {}
        self._offsets = {int(partition): int(offset) for partition, offset in restored.items()}
        core.kept["kafka"] = self.offsets
        core.sources = (*core.sources, "kafka")
        core.supervisor.start("kafka", self._run())

    async def stop(self) -> None:
        """After the supervisor has stopped its task. Within about `_STOP_S`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._call(self._consumer.close), _STOP_S)
        self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        while True:
            if time.monotonic() >= self._look_at:
                await self._look()
            for message in await self._consume():
                await self._receive(message)
            await self._retry_held()
            if time.monotonic() >= self._tell_at:
                self._tell_at = time.monotonic() + _TELL_S
                with contextlib.suppress(self._client.KafkaException):
                    self._core.kafka_lag = await self._call(self._tell)

    async def _consume(self) -> list[Any]:
        try:
            messages: list[Any] = await self._call(self._consumer.consume, _RECORDS, _POLL_S)
        except self._client.KafkaException as error:
            self._trouble(error.args[0].str())
            await asyncio.sleep(_RETRY_S)
            return []
        return messages

    async def _look(self) -> None:
        """Read partitions that are not read yet."""
        try:
            added = await self._call(self._assign)
        except self._client.KafkaException as error:
            self._look_at = time.monotonic() + _RETRY_S
            self._trouble(error.args[0].str())
            return
        self._looked = True
        if self._offsets:
            self.problem = ""
        else:
            self._trouble(f"topic {self._topic!r} does not exist yet: the first server makes it")
        self._look_at = time.monotonic() + (_LOOK_S if self._offsets else _RETRY_S)
        if added:
            log.info("kafka: reading %d partitions of %s", added, self._topic)

    def _assign(self) -> int:
        """In the thread. Partitions that came up after the first look are read from their beginning."""
        found = self._consumer.list_topics(self._topic, timeout=_METADATA_S).topics[self._topic]
        known = {each.partition for each in self._consumer.assignment()}
        wanted = []
        for partition in found.partitions if found.error is None else ():
            if partition in known:
                continue
            place = self._client.TopicPartition(self._topic, partition)
            if partition not in self._offsets:
                low, high = self._consumer.get_watermark_offsets(place, timeout=_METADATA_S)
                self._offsets[partition] = low if self._looked else high
            place.offset = self._offsets[partition]
            wanted.append(place)
        if wanted:
            self._consumer.incremental_assign(wanted)
        return len(wanted)

    def _tell(self) -> int:
        """In the thread: how far behind it is. A group is for Kafka's tools, and never read here."""
        lag = 0
        places = []
        for partition, offset in self._offsets.items():
            place = self._client.TopicPartition(self._topic, partition, offset)
            places.append(place)
            _, high = self._consumer.get_watermark_offsets(place, cached=True)
            lag += max(high - offset, 0)
        if places and self._core.config.kafka_group:
            self._consumer.commit(offsets=places, asynchronous=True)
        return lag

    async def _receive(self, message: Any) -> None:
        if message.error() is not None:
            self._trouble(message.error().str())
            return
        self.problem = ""
        batch = _parse(message.key(), message.value())
        if batch is None:
            self._bad("is no batch of the server that its key names")
        elif self._room.holds(batch.server_id) or not await self._take(batch):
            self._room.add(batch.server_id, message.value(), time.monotonic())
        self._offsets[message.partition()] = message.offset() + 1

    async def _retry_held(self) -> None:
        """Those of servers that have become members, or members with another run, since they were refused."""
        for server_id in self._room.servers():
            if self._run_of(server_id) == self._refused_for.get(server_id):
                continue
            while (record := self._room.first(server_id)) is not None:
                if not await self._take(event_pb2.CacheEventBatch.FromString(record)):
                    break
                self._room.remove_first(server_id)
        gone = self._room.expire(time.monotonic())
        if gone:
            self._log("kafka: %d records of servers that are no members were skipped", gone)
        for server_id in [each for each in self._refused_for if not self._room.holds(each)]:
            del self._refused_for[server_id]

    async def _take(self, batch: event_pb2.CacheEventBatch) -> bool:
        """False: its server is no member."""
        try:
            await self._core.intake.take(batch, "kafka")
        except ServerNotRegistered:
            self._refused_for[batch.server_id] = self._run_of(batch.server_id)
            return False
        except (InvalidArgument, TooManyItems) as error:
            self._bad(str(error))
        return True

    def _run_of(self, server_id: str) -> bytes:
        """The incarnation of the member. Empty: it is none."""
        member = self._core.fleet.members.get(server_id)
        return member.info.incarnation if member is not None else b""

    async def _call(self, action: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, action, *arguments)

    def _on_error(self, error: Any) -> None:
        """In the thread, from librdkafka, which goes on trying."""
        self._trouble(error.str())

    def _bad(self, why: str) -> None:
        self.bad_records += 1
        self._log("kafka: a record was skipped: %s", why)

    def _trouble(self, problem: str) -> None:
        self.problem = problem
        self._log("kafka: %s", problem)

    def _log(self, text: str, *arguments: object) -> None:
        now = time.monotonic()
        if now - self._logged_at >= _LOG_S:
            self._logged_at = now
            log.warning(text, *arguments)


def _parse(key: bytes | None, value: bytes | None) -> event_pb2.CacheEventBatch | None:
    try:
        batch = event_pb2.CacheEventBatch.FromString(value or b"")
    except DecodeError:
        return None
    return batch if batch.server_id and (key or b"") == batch.server_id.encode() else None


def _consumer(config: Any, on_error: Callable[[Any], None]) -> tuple[Any, Any]:
    try:
        import confluent_kafka
    except ImportError as error:
        raise MissingExtra("Events over Kafka", "kafka") from error
    settings: Mapping[str, Any] = {
        "bootstrap.servers": config.kafka,
        "group.id": config.kafka_group or "kvwire-coordinator",
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "queued.max.messages.kbytes": 16384,
        "reconnect.backoff.max.ms": 2000,
        # It would log each attempt. What it tells `on_error` is logged now and then.
        "log_level": 0,
        **dict(each.split("=", 1) for each in config.kafka_config),
    }
    try:
        return confluent_kafka, confluent_kafka.Consumer(
            settings, error_cb=on_error, logger=logging.getLogger("kvwire.kafka")
        )
    except (confluent_kafka.KafkaException, ValueError, TypeError) as error:
        raise ConfigError(f"--kafka-config: {error}", setting="kafka_config") from error
