"""How `kvwire bench engine` compares, what it refuses to believe, and the processes it talks to."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from kvwire.cli.bench import command, engine_lmcache, engine_models, report
from kvwire.cli.bench import engine as bench_engine
from kvwire.cli.bench.engine import Plan, run
from kvwire.cli.bench.engine_models import Model
from kvwire.cli.bench.engine_process import EngineProcess
from kvwire.cli.bench.engine_rounds import KVWIRE, LMCACHE, OVERLAP, WITHOUT, Bench
from kvwire.cli.bench.processes import BenchError
from kvwire.errors import ConfigError

MODEL = Model("tiny", Path("/nowhere"), 512)
CHUNK = 64


class FakeEngine:
    """Answers as an engine does: what it was asked before it has cached."""

    def __init__(self, name, log, *, seconds=1.0, steps=100.0, caches=True, shift=0):
        self.name, self.log = name, log
        self.seconds, self.rate = seconds, steps
        self.caches, self.shift = caches, shift
        self.known = set()

    def ask(self, order, **words):
        self.log.append((order, self.name))
        if order == "steps":
            return {"steps_per_s": self.rate}
        if order == "burst":
            return {"first_token_s": 2 * self.seconds, "longest_step_s": 3 * self.seconds}
        tokens = words["tokens"]
        cached = len(tokens) // CHUNK * CHUNK if tuple(tokens) in self.known else 0
        if self.caches:
            self.known.add(tuple(tokens))
        said = [token + self.shift for token in tokens[: words["max_tokens"]]]
        return {
            "first_token_s": self.seconds,
            "settled_s": 4 * self.seconds,
            "cached_tokens": cached,
            "token_ids": said,
        }


def bench(log, *, overlap=False, **engines):
    made = {
        WITHOUT: FakeEngine(WITHOUT, log, seconds=2.0, caches=False),
        KVWIRE: FakeEngine(KVWIRE, log, seconds=0.5, steps=95.0),
        **{name: FakeEngine(name, log, **how) for name, how in engines.items()},
    }
    plan = Plan(rounds=4, chunk_size=CHUNK, overlap=overlap, no_lmcache="none here")
    return Bench(plan, MODEL, made, lambda _text: None)


def report_of(running):
    running.fill()
    return bench_engine.report(running._plan, running, running.measure())


def test_ratios_are_of_one_round_and_each_round_begins_with_another_engine():
    log = []
    running = bench(log, **{LMCACHE: {"seconds": 1.0}})
    found = report_of(running)
    assert (found["ttft_vs_without"], found["ttft_vs_lmcache"]) == (0.25, 0.5)
    assert found["idle_steps_vs_without"] == 0.95
    assert found["reused_tokens"] == {WITHOUT: 0, KVWIRE: 960, LMCACHE: 960}
    filled = 3 * 2 * 3
    names = [name for order, name in log if order == "answer"][filled:]
    assert [names[i] for i in range(0, len(names), 3)] == [WITHOUT, KVWIRE, LMCACHE, WITHOUT]
    assert all(len(set(names[i : i + 3])) == 3 for i in range(0, len(names), 3))


def test_the_option_is_compared_with_the_default():
    found = report_of(bench([], overlap=True, **{OVERLAP: {"seconds": 0.25, "steps": 90.0}}))
    for name in ("ttft", "burst_ttft", "burst_longest_step", "fresh_ttft", "fresh_stored"):
        assert found[f"{name}_overlap_vs_async"] == 0.5
    assert found["idle_steps_overlap_vs_without"] == 0.9
    assert found["burst_ttft_vs_without"] == 0.25
    assert found["fresh_stored_ms"][OVERLAP] == 1000


def test_trials_start_anew_each_with_another_engine_first(monkeypatch):
    started, rounds = [], iter([1.0, 2.0])
    monkeypatch.setattr(bench_engine.engine_models, "prepare", lambda name, tell: MODEL)
    monkeypatch.setattr(bench_engine.importlib.util, "find_spec", lambda name: True)

    @contextlib.contextmanager
    def start(name, task, folder, **how):
        started.append(name)
        yield FakeEngine(name, [], caches=name != WITHOUT, seconds=next(rounds) if name == KVWIRE else 1.0)

    @contextlib.contextmanager
    def server(folder, flags):
        yield "unix:/nowhere"

    monkeypatch.setattr(bench_engine, "engine", start)
    monkeypatch.setattr(bench_engine, "kvwire_server", server)
    found = run(Plan(trials=2, rounds=3), lambda _text: None)
    assert started == [WITHOUT, KVWIRE, KVWIRE, WITHOUT]
    # Half of the rounds are of either trial.
    assert found["ttft_vs_without"] == 1.5


def test_what_is_left_out_says_why(capfd):
    found = report_of(bench([]))
    assert found["ttft_vs_lmcache"] is None
    assert found["skipped"] == {"ttft_vs_lmcache": "none here"}
    report.print_engine(found)
    shown = capfd.readouterr().out
    assert "- (none here)" in shown
    assert "0.250" in shown


def test_an_engine_that_says_something_else_is_no_measurement():
    with pytest.raises(BenchError, match="does not say"):
        bench([], **{KVWIRE: {"shift": 1}}).fill()


def test_an_engine_that_finds_nothing_is_no_measurement():
    with pytest.raises(BenchError, match="kvwire found nothing"):
        bench([], **{KVWIRE: {"caches": False}}).fill()


def test_an_engine_that_loses_its_cache_on_the_way_is_no_measurement():
    running = bench([])
    running.fill()
    kvwire = running._engines[KVWIRE]
    kvwire.known.clear()
    kvwire.caches = False
    with pytest.raises(BenchError, match="reused 0 tokens"):
        running.first_tokens()


@pytest.mark.parametrize("plan", [Plan(prompt_tokens=64), Plan(chunk_size=48), Plan(trials=0)])
def test_plans_that_measure_nothing_are_refused(plan):
    with pytest.raises(ConfigError):
        run(plan, lambda _text: None)


def test_a_model_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="gemma, llama, tiny"):
        engine_models.prepare(str(tmp_path), lambda _text: None)
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 77}}')
    assert engine_models.prepare(str(tmp_path), lambda _text: None).vocabulary == 77


@pytest.mark.leakcheck("fds")
def test_an_engine_that_dies_is_told_with_its_last_words(tmp_path):
    log = tmp_path / "engine.log"
    with EngineProcess("dead", sys.executable, log, {"PYTHONHOME": str(tmp_path)}) as process:
        with pytest.raises(BenchError, match=r"engine dead ended with status 1(.|\n)*Fatal Python error"):
            process.ask("start", timeout=20)
        with pytest.raises(BenchError, match="engine dead ended"):
            process.ask("steps")


@pytest.mark.leakcheck("fds")
def test_an_engine_that_hangs_is_told_and_ended(tmp_path):
    with (
        EngineProcess("slow", sys.executable, tmp_path / "log", {}) as process,
        pytest.raises(BenchError, match="said nothing for 0 s"),
    ):
        process.ask("steps", timeout=0)
    assert process._process.returncode is not None


def test_lmcache_is_asked_for_by_its_place(tmp_path):
    python = tmp_path / "python"
    with pytest.raises(ConfigError, match="no program `lmcache`"):
        command.neighbour(python, make=False, tell=lambda _text: None)
    for file in (python, tmp_path / "lmcache"):
        file.touch()
    lmcache, why_not = command.neighbour(python, make=False, tell=lambda _text: None)
    assert (lmcache.python, lmcache.program, why_not) == (str(python), str(tmp_path / "lmcache"), "")


def test_without_lmcache_the_reason_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("KVWIRE_CACHE_DIR", str(tmp_path))
    assert command.neighbour(None, make=False, tell=print)[1].startswith("no environment with LMCache")

    def fail(folder):
        raise ConfigError("pip could not install it")

    monkeypatch.setattr(engine_lmcache, "_make", fail)
    assert command.neighbour(None, make=True, tell=lambda _text: None) == (None, "pip could not install it")
