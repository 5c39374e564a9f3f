"""docs/metrics.md, the coordinator's dashboard and its alert rules name what it exports, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvwire.coordinator.config import CoordinatorConfig
from kvwire.coordinator.core import Core
from kvwire.coordinator.metrics import coordinator_registry
from kvwire.coordinator.service import OPEN_STREAMS
from kvwire.serving.guard import Guard
from kvwire.serving.metrics import RpcMetrics
from kvwire.serving.supervisor import Supervisor

ROOT = Path(__file__).parents[3]
GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARD = json.loads((GRAFANA / "kvwire-coordinator.json").read_text())
RULES = yaml.safe_load((GRAFANA / "kvwire-coordinator-alerts.yaml").read_text())["groups"][0]["rules"]
NAME = re.compile(r"\b(?:kvwire|process)_[a-z0-9_]+")
LABELS = re.compile(r"(kvwire_[a-z0-9_]+)\{([^}]*)\}")
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])] + [
    rule["expr"] for rule in RULES
]


@pytest.fixture(scope="module")
def exported():
    """{family: (its sample names, its labels)}"""
    core = Core(CoordinatorConfig(), Guard(1, frozenset()), Supervisor(lambda _: None))
    rpcs = RpcMetrics(OPEN_STREAMS)
    rpcs("Heartbeat", "OK", 0.1)
    text = generate_latest(coordinator_registry(rpcs, core, version="1", name="a")).decode()
    return {
        family.name: (
            {sample.name for sample in family.samples} | {family.name},
            {label for sample in family.samples for label in sample.labels},
        )
        for family in text_string_to_metric_families(text)
    }


def test_expressions_name_exported_metrics_and_their_labels(exported):
    labels_of = {name: labels for names, labels in exported.values() for name in names}
    for expression in EXPRESSIONS:
        assert not set(NAME.findall(expression)) - labels_of.keys(), expression
        for name, selector in LABELS.findall(expression):
            selected = set(re.findall(r"(\w+)\s*[=!]~?", selector))
            assert selected <= labels_of[name] | {"instance"}, expression


def test_every_metric_is_documented_with_its_labels_and_on_the_dashboard(exported):
    page = (ROOT / "docs" / "metrics.md").read_text()
    told = page.partition("## Coordinator\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(kvwire_\w+)` \| ([^|]*) \|", told, re.MULTILINE))
    own = {name for name in exported if name.startswith("kvwire_coordinator_")}
    assert {name.removesuffix("_total") for name in rows} == own
    for name, kind in rows.items():
        names, labels = exported[name.removesuffix("_total")]
        assert name in names or name + "_bucket" in names
        assert set(re.findall(r"`(\w+)`", kind)) == labels - {"le"}, name
    for name in (name for name in exported if name.startswith("kvwire_") and name not in own):
        assert f"`{name}" in page, name
    shown = {name for expression in EXPRESSIONS for name in NAME.findall(expression)}
    missing = [name for name, (names, _) in exported.items() if name[:6] == "kvwire" and not names & shown]
    assert not missing


def test_rules_and_panels_speak_to_people():
    for rule in RULES:
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "action"}
    taken = set()
    for panel in DASHBOARD["panels"]:
        assert panel["type"] == "row" or panel["description"]
        place = panel["gridPos"]
        xs, ys = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = {(x, y) for x in xs for y in ys}
        assert not cells & taken, panel["title"]
        taken |= cells
