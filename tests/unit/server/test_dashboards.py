"""docs/metrics.md, the dashboard and the alert rules name what a server exports, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvwire.server.fetch.prefetcher import FetchCounters
from kvwire.server.messages import LeaseKind
from kvwire.server.metrics import OPEN_STREAMS, ServerState, server_registry
from kvwire.server.status import EngineCounters, EngineStatus, L1Status
from kvwire.server.tiers.counters import TierCounters, TierStatus
from kvwire.serving.metrics import RpcMetrics

ROOT = Path(__file__).parents[3]
GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARD = json.loads((GRAFANA / "kvwire-server.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((GRAFANA / "kvwire-alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
NAME = re.compile(r"\b(?:kvwire|process)_[a-z0-9_]+")
LABELS = re.compile(r"(kvwire_[a-z0-9_]+)\{([^}]*)\}")


@pytest.fixture(scope="module")
def exported():
    """{family: (its sample names, its labels)}"""
    counters = EngineCounters(stored_bytes={"shm": 1}, retrieved_bytes={"shm": 1}, failures={"INTERNAL": 1})
    engine = EngineStatus(
        256, L1Status("lru", 0, 0, 0, 0, 0, 0, 0, 0), {LeaseKind.READ: 0}, 0, 0, (), (), (), counters
    )
    rpcs = RpcMetrics(OPEN_STREAMS)
    rpcs("Lookup", "OK", 0.1)
    state = ServerState(
        engine,
        registered={"coordinator:1": True},
        reporting={"coordinator:1": True},
        fetched=FetchCounters({"l2": 1}, {"l2": 1}, {"l2": 1}),
        tiers=(TierStatus("disk", "", 1, 1, 1, 1, "all", False, 1, 1, "", TierCounters()),),
    )
    registry = server_registry(rpcs, lambda: state, version="1", server_id="a")
    families = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        names = {sample.name for sample in family.samples} | {family.name}
        families[family.name] = (names, {label for sample in family.samples for label in sample.labels})
    return families


def expressions():
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    return [*panels, *(rule["expr"] for rule in RULES)]


def test_expressions_name_exported_metrics(exported):
    samples = set().union(*(names for names, _labels in exported.values()))
    for expression in expressions():
        unknown = set(NAME.findall(expression)) - samples
        assert not unknown, (unknown, expression)


def test_expressions_select_by_labels_that_exist(exported):
    labels_of = {name: labels for names, labels in exported.values() for name in names}
    for expression in expressions():
        for name, selector in LABELS.findall(expression):
            selected = set(re.findall(r"(\w+)\s*[=!]~?", selector))
            assert selected <= labels_of[name] | {"instance"}, expression


def test_every_metric_of_ours_is_documented_with_its_labels(exported):
    page = (ROOT / "docs" / "metrics.md").read_text().partition("## Coordinator\n")[0]
    rows = dict(re.findall(r"^\| `(kvwire_\w+)` \| ([^|]*) \|", page, re.MULTILINE))
    ours = {name: (names, labels) for name, (names, labels) in exported.items() if name.startswith("kvwire_")}
    documented = {name.removesuffix("_total") for name in rows}
    assert documented == set(ours)
    for name, kind in rows.items():
        family = name.removesuffix("_total")
        assert name in ours[family][0], name
        assert set(re.findall(r"`(\w+)`", kind)) == ours[family][1] - {"le"}, name


def test_every_metric_of_ours_is_on_the_dashboard(exported):
    shown = {name for expression in expressions() for name in NAME.findall(expression)}
    missing = [
        name for name, (names, _) in exported.items() if name.startswith("kvwire_") and not names & shown
    ]
    assert not missing


def test_rules_say_what_to_do():
    for rule in RULES:
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}, rule["alert"]
        assert set(rule["annotations"]) == {"summary", "action"}, rule["alert"]


def test_panels_are_described_and_do_not_overlap():
    taken = set()
    for panel in DASHBOARD["panels"]:
        assert panel["type"] == "row" or panel["description"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
