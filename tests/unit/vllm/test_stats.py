"""From tallies of several ranks to one line in the log and to Prometheus."""

from __future__ import annotations

import pickle

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvwire.vllm.adapters_transfer import Kind
from kvwire.vllm.assembly import transfer_counter
from kvwire.vllm.connector import KvwireConnector
from kvwire.vllm.stats import KvwirePromMetrics, KvwireStats
from kvwire.vllm.tally import Tally


def of_rank(*, loads=1):
    tally = Tally()
    count = transfer_counter(tally)
    for _ in range(loads):
        count(Kind.LOAD, True, 4096, 0.25)
    count(Kind.LOAD, False, 100, 0.5)
    count(Kind.STORE, True, 8192, 0.75)
    count(Kind.STORE, False, 0, 1.0)
    return KvwireStats(tally.take())


def test_ranks_are_added_up_and_the_last_word_on_usable_holds():
    found = pickle.loads(pickle.dumps(of_rank())).aggregate(of_rank(loads=2))  # noqa: S301  our own
    found = found.aggregate(KvwireStats({"usable": 0})).aggregate(KvwireStats({"usable": 1}))
    assert found.data == {
        "loads": 3,
        "failed_loads": 2,
        "loaded_bytes": 3 * 4096 + 2 * 100,
        "stores": 2,
        "dropped_stores": 2,
        "stored_bytes": 2 * 8192,
        "load_seconds": [0.25, 0.5, 0.25, 0.25, 0.5],
        "store_seconds": [0.75, 1.0, 0.75, 1.0],
        "usable": 1,
    }
    assert found.reduce()["mean load ms"] == 350.0
    assert found.reduce()["failed loads"] == 2


def test_an_interval_that_is_over_is_not_changed_by_the_next_one():
    first, second = of_rank(), of_rank()
    before = list(second.data["load_seconds"])
    KvwireStats().aggregate(second).aggregate(first)
    assert second.data["load_seconds"] == before


def test_empty_is_empty():
    stats = KvwireConnector.build_kv_connector_stats()
    assert stats.is_empty()
    assert not KvwireConnector.build_kv_connector_stats({"loads": 1}).is_empty()
    stats.aggregate(of_rank()).reset()
    assert stats.is_empty()


class Registered:
    """vLLM's metric types, in a registry of the test's own."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.types = {
            kind: lambda *args, kind=kind, **fields: kind(
                *args, registry=self.registry, **{k: v for k, v in fields.items() if k != "multiprocess_mode"}
            )
            for kind in (Counter, Gauge, Histogram)
        }


@pytest.fixture
def config():
    class Config:
        kv_transfer_config = None

    return Config()


def test_each_engine_has_its_own_numbers(config):
    registered = Registered()
    metrics = KvwirePromMetrics(config, registered.types, ["engine"], {0: ["0"], 1: ["1"]})
    metrics.observe(of_rank().data, 0)
    metrics.observe(of_rank(loads=2).data, 1)
    metrics.observe({"usable": 1, "from a newer version": 7}, 1)
    value = registered.registry.get_sample_value
    assert value("vllm:kvwire_loads_total", {"engine": "0"}) == 1
    assert value("vllm:kvwire_loads_total", {"engine": "1"}) == 2
    assert value("vllm:kvwire_load_seconds_sum", {"engine": "1"}) == 1.0
    assert value("vllm:kvwire_usable", {"engine": "1"}) == 1
    assert b"newer" not in generate_latest(registered.registry)
