"""Real engines with kvwire, without a connector, and with LMCache's: time to first token, and idle steps.

All engines live at once and wait without work while another one is measured. They take turns in short rounds,
each round beginning with another one, and ratios are made inside a round: load from outside hits all of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvwire.cli.bench import engine_lmcache, engine_models, stats
from kvwire.cli.bench.engine_process import EngineProcess, engine
from kvwire.cli.bench.processes import BenchError, kvwire_server, work_folder
from kvwire.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from kvwire.cli.bench.engine_lmcache import LmCache
    from kvwire.cli.bench.engine_models import Model

    Progress = Callable[[str], None]
    Samples = dict[str, list[float]]

WITHOUT: Final = "without"
KVWIRE: Final = "kvwire"
OVERLAP: Final = "kvwire-overlap"
LMCACHE: Final = "lmcache"

BLOCK_SIZE: Final = 32
KV_BYTES: Final = 256 << 20
L1_SIZE: Final = "1GiB"
PROMPTS: Final = 3
COMPARED_TOKENS: Final = 8
IDLE_REQUESTS: Final = 4
IDLE_PROMPT_TOKENS: Final = 16
"""Shorter than any chunk: there is nothing to look up, to load or to store."""
STRETCH_S: Final = 0.2
STRETCHES: Final = 3
"""Of idle steps in each round: what they differ by is smaller than what other load does to one of them."""
STEP_COUNTS: Final = (10, 400)


@dataclass(frozen=True, slots=True)
class Plan:
    """`lmcache`: where it is; `no_lmcache`: why it is left out."""

    model: str = engine_models.GEMMA
    prompt_tokens: int = 1000
    chunk_size: int = 64
    path: str = "auto"
    rounds: int = 12
    threads: int = 1
    overlap: bool = False
    lmcache: LmCache | None = None
    no_lmcache: str = ""

    def check(self) -> None:
        if self.prompt_tokens <= self.chunk_size:
            raise ConfigError(
                f"--prompt-tokens {self.prompt_tokens}: nothing of it is reused with chunks of "
                f"{self.chunk_size} tokens.",
                setting="prompt_tokens",
            )
        if self.chunk_size % BLOCK_SIZE:
            raise ConfigError(
                f"--chunk-size {self.chunk_size} is no multiple of a block, {BLOCK_SIZE} tokens.",
                setting="chunk_size",
            )

    @property
    def max_model_len(self) -> int:
        return max(self.prompt_tokens, IDLE_PROMPT_TOKENS + STEP_COUNTS[1]) + BLOCK_SIZE


def run(plan: Plan, progress: Progress) -> dict[str, Any]:
    """Ratios, and what they are made of. What was left out is in "skipped", with the reason."""
    plan.check()
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra("kvwire bench engine", "vllm")
    model = engine_models.prepare(plan.model, progress)
    with work_folder() as folder, contextlib.ExitStack() as stack:
        engines = _start(plan, model, folder, stack, progress)
        bench = Bench(plan, model, engines, progress)
        bench.fill()
        found = bench.report(bench.first_tokens(), bench.idle_steps())
        if plan.overlap:
            found |= bench.report_bursts(*bench.bursts()) | bench.report_fresh(*bench.fresh())
        return found


@dataclass(frozen=True, slots=True)
class Variant:
    """One engine: its connector, and the interpreter and environment that it runs in."""

    name: str
    transfer: dict[str, Any] | None
    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)
    one_group: bool = False


def _start(
    plan: Plan, model: Model, folder: Path, stack: contextlib.ExitStack, progress: Progress
) -> dict[str, EngineProcess]:
    engines: dict[str, EngineProcess] = {}
    for each in _variants(plan, folder, stack, progress):
        progress(f"starting the engine {each.name}, {model.name}")
        task = {
            "model": str(model.folder),
            "block_size": BLOCK_SIZE,
            "max_model_len": plan.max_model_len,
            "kv_bytes": KV_BYTES,
            "kv_transfer": each.transfer,
            "one_group": each.one_group,
        }
        env = {"OMP_NUM_THREADS": str(plan.threads), **each.env}
        running = engine(each.name, task, folder, python=each.python, env=env)
        engines[each.name] = stack.enter_context(running)
    return engines


def _variants(plan: Plan, folder: Path, stack: contextlib.ExitStack, progress: Progress) -> Iterator[Variant]:
    """Each with its server running."""
    yield Variant(WITHOUT, None)
    flags = ["--l1-size", L1_SIZE, "--chunk-size", str(plan.chunk_size)]
    address = stack.enter_context(kvwire_server(folder, flags))
    yield Variant(KVWIRE, connector_config(address, plan.path))
    if plan.overlap:
        yield Variant(OVERLAP, connector_config(address, plan.path, overlap=True))
    if plan.lmcache is not None:
        progress("starting LMCache's server")
        transfer = stack.enter_context(engine_lmcache.serving(plan.lmcache, folder, plan.chunk_size))
        yield Variant(LMCACHE, transfer, plan.lmcache.python, engine_lmcache.ENVIRONMENT, one_group=True)


def connector_config(address: str, path: str, **extra: object) -> dict[str, Any]:
    return {
        "kv_connector": "KvwireConnector",
        "kv_connector_module_path": "kvwire.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "kvwire.address": address,
            "kvwire.data_path": path,
            **{f"kvwire.{name}": value for name, value in extra.items()},
        },
    }


class Bench:
    """The rounds. What each engine showed is kept by its name, one sample per round."""

    def __init__(
        self, plan: Plan, model: Model, engines: Mapping[str, EngineProcess], progress: Progress
    ) -> None:
        self._plan = plan
        self._model = model
        self._engines = engines
        self._progress = progress
        self._source = random.Random(7)  # noqa: S311  no secret
        self._prompts = [self._prompt(self._source, plan.prompt_tokens) for _ in range(PROMPTS)]
        self._short = [self._prompt(self._source, IDLE_PROMPT_TOKENS) for _ in range(IDLE_REQUESTS)]
        self._reused: dict[str, int] = {}
        self._identical: dict[str, bool] = {}

    def fill(self) -> None:
        """Every cache gets the prompts and gives them back, and what is said then is compared."""
        right: list[list[int]] = []
        for name, process in self._engines.items():
            self._progress(f"filling {name}")
            said: list[list[int]] = []
            for prompt in self._prompts:
                process.ask("answer", tokens=prompt, max_tokens=1)
                again = process.ask("answer", tokens=prompt, max_tokens=COMPARED_TOKENS)
                self._note_reuse(name, again["cached_tokens"])
                said.append(again["token_ids"])
            right = right or said
            self._identical[name] = said == right
        if not self._identical[KVWIRE] or not self._identical.get(OVERLAP, True):
            raise BenchError("An engine with kvwire does not say what the one without it says.")

    def _note_reuse(self, name: str, tokens: int) -> None:
        if name != WITHOUT and not tokens:
            raise BenchError(f"The engine {name} found nothing of a prompt that it had stored.")
        self._reused[name] = tokens

    def first_tokens(self) -> Samples:
        """Seconds to the first token of a prompt that every cache has."""
        samples: Samples = defaultdict(list)
        for number, name, process in self._turns("time to first token"):
            prompt = self._prompts[number % PROMPTS]
            answer = process.ask("answer", tokens=prompt, max_tokens=1)
            if answer["cached_tokens"] != self._reused[name]:
                raise BenchError(f"The engine {name} reused {answer['cached_tokens']} tokens.")
            samples[name].append(answer["first_token_s"])
        return samples

    def fresh(self) -> tuple[Samples, Samples]:
        """Prompts that nobody has: seconds to the first token, and until they are stored."""
        first: Samples = defaultdict(list)
        settled: Samples = defaultdict(list)
        for _, name, process in self._turns("fresh prompts"):
            prompt = self._prompt(self._source, self._plan.prompt_tokens)
            answer = process.ask("answer", tokens=prompt, max_tokens=1)
            first[name].append(answer["first_token_s"])
            settled[name].append(answer["settled_s"])
        return first, settled

    def bursts(self) -> tuple[Samples, Samples]:
        """All prompts at once, beside requests that generate: seconds to the first token, and the longest
        step meanwhile."""
        first: Samples = defaultdict(list)
        longest: Samples = defaultdict(list)
        for _, name, process in self._turns("bursts"):
            answer = process.ask("burst", prompts=self._prompts, short=self._short, count=STEP_COUNTS[1])
            first[name].append(answer["first_token_s"])
            longest[name].append(answer["longest_step_s"])
        return first, longest

    def idle_steps(self) -> Samples:
        """Steps per second, while no connector has anything to do."""
        self._progress("idle steps: warming up")
        trial = [
            each.ask("steps", prompts=self._short, count=STEP_COUNTS[0]) for each in self._engines.values()
        ]
        rate = max(each["steps_per_s"] for each in trial)
        count = max(STEP_COUNTS[0], min(STEP_COUNTS[1], int(rate * STRETCH_S)))
        samples: Samples = defaultdict(list)
        for _, name, process in self._turns("idle steps", STRETCHES):
            samples[name].append(process.ask("steps", prompts=self._short, count=count)["steps_per_s"])
        return samples

    def _turns(self, title: str, times: int = 1) -> Iterator[tuple[int, str, EngineProcess]]:
        names = list(self._engines)
        rounds = self._plan.rounds * times
        for number in range(rounds):
            self._progress(f"{title}: round {number + 1} of {rounds}")
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                yield number, name, self._engines[name]

    def report(self, seconds: Samples, steps: Samples) -> dict[str, Any]:
        plan = self._plan
        told: dict[str, Any] = {
            "ttft_vs_without": _ratio(seconds, KVWIRE, WITHOUT),
            "ttft_vs_lmcache": _ratio(seconds, KVWIRE, LMCACHE),
            "idle_steps_vs_without": _ratio(steps, KVWIRE, WITHOUT),
        }
        if plan.overlap:
            told["ttft_overlap_vs_async"] = _ratio(seconds, OVERLAP, KVWIRE)
            told["idle_steps_overlap_vs_without"] = _ratio(steps, OVERLAP, WITHOUT)
        told |= {
            "ttft_ms": _milliseconds(seconds),
            "steps_per_s": {name: round(stats.median(each), 1) for name, each in steps.items()},
            "model": self._model.name,
            "prompt_tokens": plan.prompt_tokens,
            "reused_tokens": self._reused,
            "identical": self._identical,
            "chunk_size": plan.chunk_size,
            "path": plan.path,
            "rounds": plan.rounds,
            "threads": plan.threads,
            "skipped": {} if plan.lmcache else {"ttft_vs_lmcache": plan.no_lmcache},
        }
        return told

    def report_bursts(self, first: Samples, longest: Samples) -> dict[str, Any]:
        return {
            "burst_ttft_vs_without": _ratio(first, KVWIRE, WITHOUT),
            "burst_ttft_overlap_vs_async": _ratio(first, OVERLAP, KVWIRE),
            "burst_longest_step_overlap_vs_async": _ratio(longest, OVERLAP, KVWIRE),
            "burst_ttft_ms": _milliseconds(first),
            "burst_longest_step_ms": _milliseconds(longest),
        }

    def report_fresh(self, first: Samples, settled: Samples) -> dict[str, Any]:
        return {
            "fresh_ttft_overlap_vs_async": _ratio(first, OVERLAP, KVWIRE),
            "fresh_stored_overlap_vs_async": _ratio(settled, OVERLAP, KVWIRE),
            "fresh_ttft_ms": _milliseconds(first),
            "fresh_stored_ms": _milliseconds(settled),
        }

    def _prompt(self, source: random.Random, length: int) -> list[int]:
        return [source.randrange(3, self._model.vocabulary) for _ in range(length)]


def _milliseconds(samples: Samples) -> dict[str, float]:
    return {name: round(stats.median(each) * 1e3, 2) for name, each in samples.items()}


def _ratio(samples: Samples, upper: str, lower: str) -> float | None:
    if upper not in samples or lower not in samples:
        return None
    return round(stats.median_ratio(samples[upper], samples[lower]), 3)
