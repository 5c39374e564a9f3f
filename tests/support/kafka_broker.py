"""A broker in a process of its own, so that it can be stopped and killed: librdkafka's mock cluster.

It makes topics by itself, with 4 partitions unless told. What an ended one had is gone.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

PROGRAM = """
import sys
import confluent_kafka
settings = {"test.mock.num.brokers": 1, "log_level": 0}
producer = confluent_kafka.Producer(settings)
(broker,) = producer.list_topics(timeout=10).brokers.values()
print(f"{broker.host}:{broker.port}", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def kafka_broker():
    """Its process; `address` is what clients take."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        process.address = process.stdout.readline().strip()
        assert process.address
        yield process
    finally:
        process.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()
