"""Events into a Kafka topic, for any number of coordinators.

Records of one server have its id as key, so they are in one partition, in order. A record that arrives twice,
or after a hole, is told by its sequence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvwire.errors import ConfigError, MissingExtra
from kvwire.server.reporting.batches import with_lost
from kvwire.v1 import event_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.server.config import ServerConfig
    from kvwire.server.journal import Closed, Reader

T = TypeVar("T")
log = logging.getLogger("kvwire.server")

WINDOW: Final = 64
"""Batches that may be on the way without a delivery report."""
RECORD_BYTES: Final = 900_000
"""A record is smaller: brokers take 1 MB, with key and headers, unless they are told otherwise."""
FLUSH_S: Final = 1.0
"""For what is on the way when the server stops."""
STALL_S: Final = 2.0
"""Without a delivery report for what is on the way: then it shows as a problem."""
_POLL_S: Final = 0.1
_IDLE_S: Final = 1.0
_RETRY_S: Final = 1.0
_LOG_S: Final = 30.0


class DeliveryFailedError(Exception):
    """Kafka has refused a record; what was not acknowledged is sent again by a new producer."""


class KafkaReporter:
    """`problem` is empty while records arrive. All of librdkafka is called in one thread of its own."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises MissingExtra, ConfigError. It connects later, and goes on trying."""
        self.topic = config.kafka_topic
        self.problem = ""
        self.arrived = 0
        self._make = _producer_maker(config, self._on_error)
        self._producer: Any = self._make()
        self._thread = ThreadPoolExecutor(1, "kvwire-kafka")
        self._reader: Reader
        self._key = b""
        self._sent: deque[int] = deque()
        self._reports: deque[tuple[int, str]] = deque()
        self._delivered: set[int] = set()
        self._heard_at = 0.0
        self._logged_at = -_LOG_S

    def start(self, reader: Reader, server_id: str) -> None:
        """From here on `run` may run, and `stop` has to come."""
        self._reader = reader
        self._key = server_id.encode()

    async def run(self) -> None:
        """For ever. Whatever goes wrong: what was not acknowledged is sent again."""
        while True:
            try:
                await self._report()
            except Exception as error:
                self._trouble(str(error) or type(error).__name__)
                if not isinstance(error, DeliveryFailedError):
                    log.exception("kafka: unexpected; it goes on")
            await asyncio.sleep(_RETRY_S)
            with contextlib.suppress(Exception):
                await self._call(self._renew)
            self._forget_sent()

    async def stop(self) -> None:
        """After `run` was cancelled. Sends the rest, if it can be done at once."""
        rest = self._reader.take(WINDOW)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._call(self._finish, rest), FLUSH_S + 0.5)
        self._settle()
        self._thread.shutdown(wait=False)

    async def _report(self) -> None:
        self._heard_at = time.monotonic()
        while True:
            room = WINDOW - len(self._sent)
            batches = self._reader.take(room) if room > 0 else []
            if not batches and not self._sent:
                batches = await self._next(room)
            if not batches and not self._sent and self.problem:
                await self._call(self._ask)
            self._sent.extend(closed.sequence for closed in batches)
            await self._call(self._turn, batches, _POLL_S if self._sent else 0)
            self._settle()

    async def _next(self, room: int) -> list[Closed]:
        """Now and then without any: librdkafka has to be polled for its errors, too."""
        try:
            # Not wait_for: in Python 3.11 it forgets a cancellation that comes together with an event.
            async with asyncio.timeout(_IDLE_S):
                return await self._reader.wait(room)
        except TimeoutError:
            return []
        finally:
            self._heard_at = time.monotonic()

    def _settle(self) -> None:
        """Acknowledge what has arrived, in order. Raises DeliveryFailedError."""
        while self._reports:
            sequence, error = self._reports.popleft()
            if error:
                raise DeliveryFailedError(error)
            self._delivered.add(sequence)
            self._heard_at = time.monotonic()
            self.problem = ""
        while self._sent and self._sent[0] in self._delivered:
            self.arrived = self._sent.popleft()
            self._delivered.discard(self.arrived)
            self._reader.acknowledge(self.arrived)
        silence = time.monotonic() - self._heard_at
        if self._sent and silence > STALL_S and not self.problem:
            self._trouble(f"no answer for {STALL_S:.0f} s")

    def _forget_sent(self) -> None:
        self._sent.clear()
        self._reports.clear()
        self._delivered.clear()
        self._reader.rewind()

    def _turn(self, batches: Sequence[Closed], poll_s: float) -> None:
        """In the thread."""
        for closed in batches:
            self._produce(closed)
        self._producer.poll(poll_s)

    def _produce(self, closed: Closed) -> None:
        sequence = closed.sequence
        reports = self._reports

        def delivered(error: Any, _message: Any) -> None:
            reports.append((sequence, error.str() if error is not None else ""))

        self._producer.produce(self.topic, key=self._key, value=record(closed), on_delivery=delivered)

    def _ask(self) -> None:
        """In the thread: whether the brokers answer again, while there is nothing to send."""
        with contextlib.suppress(Exception):
            self._producer.list_topics(self.topic, timeout=_IDLE_S)
            self.problem = ""

    def _renew(self) -> None:
        """In the thread. Reports of the former producer are none any more."""
        former, self._reports = self._producer, deque()
        former.purge()
        self._producer = self._make()

    def _finish(self, rest: Sequence[Closed]) -> None:
        self._turn(rest, 0)
        self._producer.flush(FLUSH_S)
        self._producer.purge()

    async def _call(self, action: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, action, *arguments)

    def _on_error(self, error: Any) -> None:
        """In the thread, from librdkafka, which goes on trying."""
        self._trouble(error.str())

    def _trouble(self, problem: str) -> None:
        self.problem = problem
        now = time.monotonic()
        if now - self._logged_at >= _LOG_S:
            self._logged_at = now
            log.warning("kafka: %s; events wait", problem)


def record(closed: Closed) -> bytes:
    """A batch as Kafka takes it: one that is too large goes without the tokens of its chunks."""
    value = with_lost(closed)
    if len(value) <= RECORD_BYTES:
        return value
    batch = event_pb2.CacheEventBatch.FromString(value)
    for event in batch.events:
        event.ClearField("tokens")
    return batch.SerializeToString()


def _producer_maker(config: ServerConfig, on_error: Callable[[Any], None]) -> Callable[[], Any]:
    try:
        import confluent_kafka
    except ImportError as error:
        raise MissingExtra("Events over Kafka", "kafka") from error
    settings: dict[str, Any] = {
        "bootstrap.servers": config.kafka,
        "client.id": "kvwire",
        "enable.idempotence": True,
        "acks": "all",
        "message.timeout.ms": 0,
        "socket.timeout.ms": 10_000,
        "reconnect.backoff.max.ms": 2000,
        # It would log each attempt. What it tells `on_error` is logged now and then.
        "log_level": 0,
        "partitioner": "murmur2_random",
        **dict(each.split("=", 1) for each in config.kafka_config),
    }

    def make() -> Any:
        try:
            return confluent_kafka.Producer(
                settings, error_cb=on_error, logger=logging.getLogger("kvwire.kafka")
            )
        except (confluent_kafka.KafkaException, ValueError, TypeError) as error:
            raise ConfigError(f"--kafka-config: {error}", setting="kafka_config") from error

    return make
