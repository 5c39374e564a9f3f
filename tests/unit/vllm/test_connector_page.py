"""The pages of the connector and of the metrics state what the code has."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvwire.vllm import versions
from kvwire.vllm.announce import MEDIUM
from kvwire.vllm.config import ConnectorConfig
from kvwire.vllm.params import ANSWER, RequestParams, answer
from kvwire.vllm.tally import COUNTERS, DURATIONS, USABLE
from kvwire.vllm.tracker import Account

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "connector.md").read_text()
METRICS = (DOCS / "metrics.md").read_text()


def shown(value):
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    if value == "":
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def row(each):
    return f"| `kvwire.{each.name}` | {shown(each.default)} | {each.metadata['help']} |"


@pytest.mark.parametrize("cls", [ConnectorConfig, RequestParams])
def test_every_setting_has_its_row(cls):
    wanted = [row(each) for each in fields(cls)]
    missing = [line for line in wanted if line not in PAGE.splitlines()]
    assert not missing, "docs/connector.md lacks:\n" + "\n".join(missing)


def test_no_row_is_left_over():
    rows = set(re.findall(r"^\| `kvwire\.\w+` \|.*$", PAGE, re.MULTILINE))
    assert rows == {row(each) for cls in (ConnectorConfig, RequestParams) for each in fields(cls)}


def test_the_statistics_of_a_response():
    told = answer(Account(), 1)[ANSWER]
    assert re.findall(r"^\| `(\w+)` \| (?:tokens|text)", PAGE, re.MULTILINE) == list(told)


def test_the_medium_and_the_versions():
    assert f'`"{MEDIUM}"`' in PAGE
    assert f"vLLM {versions.tried()}" in PAGE


def test_the_metrics_in_vllms_own_page():
    rows = re.findall(r"^\| `vllm:kvwire_(\w+)` \| (\w+) \| (\w+)", METRICS, re.MULTILINE)
    kinds = {name: kind for name, kind, _unit in rows}
    assert kinds == {
        **{f"{name}_total": "counter" for name in COUNTERS},
        **dict.fromkeys(DURATIONS, "histogram"),
        USABLE: "gauge",
    }
    for name, _kind, unit in rows:
        word = name.removesuffix("_total").rpartition("_")[2]
        if word in {"tokens", "bytes", "seconds"}:
            assert unit == word
