"""Real engines: what was computed at server a, found through server b, and computed again without peers.

Engine a stores through server a. Engine b asks server b, which gets it from a. The engine alone has a server
of its own that knows no fleet, and computes. Their own prefix caches are off.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import sys
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvwire.cli.bench import engine_models, stats
from kvwire.cli.bench.engine import KV_BYTES, connector_config
from kvwire.cli.bench.engine_process import EngineProcess, engine
from kvwire.cli.bench.peer.fleet import Counts, Fleet, fleet
from kvwire.cli.bench.peer.plan import BLOCK_TOKENS
from kvwire.cli.bench.processes import BenchError, kvwire_server, work_folder
from kvwire.errors import MissingExtra
from kvwire.keys import pack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvwire.cli.bench.engine_models import Model
    from kvwire.cli.bench.peer.plan import Plan

L1_SIZE: Final = "2GiB"
COMPARED_TOKENS: Final = 8
A, B, ALONE = "a", "b", "alone"


@dataclass(slots=True)
class Engines:
    """Three engines, and the two servers that share."""

    plan: Plan
    model: Model
    running: Fleet
    engines: dict[str, EngineProcess]
    progress: Callable[[str], None]
    source: random.Random = field(default_factory=lambda: random.Random(11))  # noqa: S311  no secret

    def prompt(self, length: int) -> list[int]:
        return [self.source.randrange(3, self.model.vocabulary) for _ in range(length)]

    def shared(self, length: int) -> int:
        """Reusable tokens of a prompt of that length: whole chunks, and at least one is computed."""
        return (length - 1) // self.plan.chunk_size * self.plan.chunk_size

    def located(self, prompt: list[int]) -> None:
        """Until the directory has all of it."""
        (space, *_) = self.running.a.status().namespaces
        chunks = len(prompt) // self.plan.chunk_size
        self.running.located(space.namespace, pack_tokens(array("I", prompt)), chunks)

    def answer(self, name: str, prompt: list[int]) -> dict[str, Any]:
        return self.engines[name].ask("answer", tokens=prompt, max_tokens=COMPARED_TOKENS)

    def meet(self) -> None:
        """Once all the way, so that connections are there and code is warm."""
        self.progress("warming up")
        for name in (A, B, ALONE):
            self.answer(name, self.prompt(self.plan.prompt_tokens))
        self.running.acquainted()
        prompt = self.prompt(self.plan.prompt_tokens)
        self.answer(A, prompt)
        self.located(prompt)
        self.answer(B, prompt)


@contextlib.contextmanager
def three_engines(plan: Plan, progress: Callable[[str], None]) -> Iterator[Engines]:
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra("kvwire bench peer --part engines", "vllm")
    model = engine_models.prepare(plan.model, progress)
    with work_folder() as folder, contextlib.ExitStack() as stack:
        flags = ("--l1-size", L1_SIZE, "--chunk-size", str(plan.chunk_size))
        running = stack.enter_context(fleet(folder, flags))
        alone = stack.enter_context(kvwire_server(folder, flags, name=ALONE))
        addresses = {A: running.a.address, B: running.b.address, ALONE: alone}
        engines = {}
        for name, address in addresses.items():
            progress(f"starting the engine {name}, {model.name}")
            engines[name] = stack.enter_context(_engine(plan, model, name, address, folder))
        found = Engines(plan, model, running, engines, progress)
        found.meet()
        yield found


def _engine(
    plan: Plan, model: Model, name: str, address: str, folder: Path
) -> contextlib.AbstractContextManager[EngineProcess]:
    task = {
        "model": str(model.folder),
        "block_size": BLOCK_TOKENS,
        "max_model_len": plan.prompt_tokens + plan.question_tokens + plan.answer_tokens + BLOCK_TOKENS,
        "kv_bytes": KV_BYTES,
        "kv_transfer": connector_config(address, "auto"),
        "one_group": False,
    }
    return engine(name, task, folder, python=sys.executable, env={"OMP_NUM_THREADS": str(plan.threads)})


def first_tokens(bench: Engines) -> dict[str, Any]:
    """One prompt at a time: computed at a, found again there, got by b from a, computed alone."""
    plan = bench.plan
    seconds: dict[str, list[float]] = {"computed": [], "local": [], "peer": [], "recomputed": []}
    before = Counts.of(bench.running.b)
    for number in range(plan.first_tokens):
        bench.progress(f"time to first token: prompt {number + 1} of {plan.first_tokens}")
        prompt = bench.prompt(plan.prompt_tokens)
        answers = {"computed": bench.answer(A, prompt)}
        bench.located(prompt)
        turns = [("local", A), ("peer", B), ("recomputed", ALONE)]
        for title, name in turns if number % 2 else turns[::-1]:
            answers[title] = bench.answer(name, prompt)
        _check(bench, answers)
        for title, each in answers.items():
            seconds[title].append(each["first_token_s"])
    return {
        "ttft_peer_vs_recompute": round(stats.median_ratio(seconds["peer"], seconds["recomputed"]), 3),
        "ttft_peer_vs_local": round(stats.median_ratio(seconds["peer"], seconds["local"]), 3),
        "ttft_ms": {name: round(stats.median(each) * 1e3, 1) for name, each in seconds.items()},
        "identical": True,
        "prompts": plan.first_tokens,
        "peer_tokens": bench.shared(plan.prompt_tokens),
        **Counts.of(bench.running.b).since(before),
    }


def _check(bench: Engines, answers: dict[str, dict[str, Any]]) -> None:
    shared = bench.shared(bench.plan.prompt_tokens)
    expected = {"computed": 0, "local": shared, "peer": shared, "recomputed": 0}
    for title, tokens in expected.items():
        if answers[title]["cached_tokens"] != tokens:
            told = f"{answers[title]['cached_tokens']} tokens were reused, {tokens} were expected"
            raise BenchError(f"{title}: {told}. {bench.running.b.sharing()}")
        if answers[title]["token_ids"] != answers["computed"]["token_ids"]:
            raise BenchError(f"{title}: the engine does not say what the one that computed it said.")


def experiment(bench: Engines) -> dict[str, Any]:
    """Contexts that the first engine has, and then a round of questions on them at another one."""
    plan = bench.plan
    mean: dict[str, list[float]] = {B: [], ALONE: []}
    longest: dict[str, list[float]] = {B: [], ALONE: []}
    duration: dict[str, list[float]] = {B: [], ALONE: []}
    before, identical = Counts.of(bench.running.b), 0
    for number in range(plan.experiments):
        bench.progress(f"query rounds: {number + 1} of {plan.experiments}, warming the contexts")
        contexts = [bench.prompt(plan.prompt_tokens) for _ in range(plan.contexts)]
        for each in contexts:
            bench.answer(A, each)
        for each in contexts:
            bench.located(each)
        queries = [context + bench.prompt(plan.question_tokens) for context in contexts]
        bench.progress(f"query rounds: {number + 1} of {plan.experiments}")
        answers = {}
        for name in (B, ALONE) if number % 2 else (ALONE, B):
            answers[name] = bench.engines[name].ask(
                "round", prompts=queries, max_tokens=plan.answer_tokens, in_flight=plan.in_flight
            )
            mean[name].append(stats.mean(answers[name]["first_token_s"]))
            longest[name].append(max(answers[name]["first_token_s"]))
            duration[name].append(answers[name]["seconds"])
        identical += _identical(bench, answers)
    return {
        "query_ttft_vs_without": round(stats.median_ratio(mean[B], mean[ALONE]), 3),
        "query_round_vs_without": round(stats.median_ratio(duration[B], duration[ALONE]), 3),
        "contexts": plan.contexts,
        "context_tokens": plan.prompt_tokens,
        "question_tokens": plan.question_tokens,
        "answer_tokens": plan.answer_tokens,
        "in_flight": plan.in_flight,
        "rounds": plan.experiments,
        "identical_answers": identical,
        "answers": plan.experiments * plan.contexts,
        "with_peers": _round(mean[B], longest[B], duration[B]),
        "without_peers": _round(mean[ALONE], longest[ALONE], duration[ALONE]),
        **Counts.of(bench.running.b).since(before),
    }


def _round(mean: list[float], longest: list[float], duration: list[float]) -> dict[str, float]:
    return {
        "mean_ttft_s": round(stats.median(mean), 3),
        "longest_ttft_s": round(stats.median(longest), 3),
        "round_s": round(stats.median(duration), 3),
    }


def _identical(bench: Engines, answers: dict[str, dict[str, Any]]) -> int:
    """How many answers are the same. Others may differ in rounding: requests share steps in another way."""
    plan = bench.plan
    expected = plan.contexts * (plan.prompt_tokens // plan.chunk_size * plan.chunk_size)
    if answers[B]["cached_tokens"] != expected or answers[ALONE]["cached_tokens"]:
        told = f"{answers[B]['cached_tokens']} of {expected} tokens came from the other server, and"
        raise BenchError(f"{told} {answers[ALONE]['cached_tokens']} of 0 without one.")
    said = zip(answers[B]["token_ids"], answers[ALONE]["token_ids"], strict=True)
    return sum(one == other for one, other in said)
