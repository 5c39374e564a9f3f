"""Real engines with kvwire, without a connector, and with LMCache's: time to first token, and idle steps.

All engines live at once and wait without work while another one is measured. They take turns in short rounds,
each round beginning with another one, and ratios are made inside a round: load from outside hits all of them.
Several trials start everything anew: where a process happens to lie makes a lasting difference.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvwire.cli.bench import engine_lmcache, engine_models, stats
from kvwire.cli.bench.engine_process import EngineProcess, engine
from kvwire.cli.bench.engine_rounds import (
    IDLE_PROMPT_TOKENS,
    KVWIRE,
    LMCACHE,
    OVERLAP,
    STEP_COUNTS,
    WITHOUT,
    Bench,
    Samples,
)
from kvwire.cli.bench.processes import kvwire_server, work_folder
from kvwire.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from kvwire.cli.bench.engine_lmcache import LmCache
    from kvwire.cli.bench.engine_models import Model

    Progress = Callable[[str], None]

BLOCK_SIZE: Final = 32
KV_BYTES: Final = 256 << 20
L1_SIZE: Final = "1GiB"


@dataclass(frozen=True, slots=True)
class Plan:
    """`rounds` are those of each trial. `lmcache`: where it is; `no_lmcache`: why it is left out."""

    model: str = engine_models.GEMMA
    prompt_tokens: int = 1000
    chunk_size: int = 64
    path: str = "auto"
    trials: int = 3
    rounds: int = 4
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
        for name in ("trials", "rounds", "threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: at least 1.", setting=name)
        if self.chunk_size % BLOCK_SIZE or not self.chunk_size:
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
    measured: dict[str, Samples] = defaultdict(lambda: defaultdict(list))
    benches = [
        _try(plan, model, trial, measured, _numbered(progress, trial, plan.trials))
        for trial in range(plan.trials)
    ]
    return report(plan, benches[-1], measured)


def _numbered(progress: Progress, trial: int, trials: int) -> Progress:
    return lambda what: progress(f"trial {trial + 1} of {trials}: {what}")


def _try(plan: Plan, model: Model, trial: int, measured: dict[str, Samples], progress: Progress) -> Bench:
    """One trial, with engines and servers of its own. Its samples join the others'."""
    with work_folder() as folder, contextlib.ExitStack() as stack:
        engines = _start(plan, model, trial, folder, stack, progress)
        bench = Bench(plan, model, engines, progress)
        bench.fill()
        for title, samples in bench.measure().items():
            for name, each in samples.items():
                measured[title][name] += each
    return bench


@dataclass(frozen=True, slots=True)
class Variant:
    """One engine: its connector, and the interpreter and environment that it runs in."""

    name: str
    transfer: dict[str, Any] | None
    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)
    one_group: bool = False


def _start(
    plan: Plan,
    model: Model,
    trial: int,
    folder: Path,
    stack: contextlib.ExitStack,
    progress: Progress,
) -> dict[str, EngineProcess]:
    """Each trial begins with another one: the first to start is not like the others."""
    engines: dict[str, EngineProcess] = {}
    variants = list(_variants(plan, folder, stack, progress))
    first = trial % len(variants)
    for each in (*variants[first:], *variants[:first]):
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
    return {each.name: engines[each.name] for each in variants}


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


def report(plan: Plan, bench: Bench, measured: Mapping[str, Samples]) -> dict[str, Any]:
    seconds, steps = measured["ttft"], measured["steps"]
    told: dict[str, Any] = {
        "ttft_vs_without": _ratio(seconds, KVWIRE, WITHOUT),
        "ttft_vs_lmcache": _ratio(seconds, KVWIRE, LMCACHE),
        "idle_steps_vs_without": _ratio(steps, KVWIRE, WITHOUT),
    }
    if plan.overlap:
        told |= _overlap(measured)
    told |= {
        "ttft_ms": _milliseconds(seconds),
        "steps_per_s": {name: round(stats.median(each), 1) for name, each in steps.items()},
        "model": bench.model.name,
        "prompt_tokens": plan.prompt_tokens,
        "reused_tokens": bench.reused,
        "identical": bench.identical,
        "chunk_size": plan.chunk_size,
        "path": plan.path,
        "trials": plan.trials,
        "rounds": plan.rounds,
        "threads": plan.threads,
        "skipped": {} if plan.lmcache else {"ttft_vs_lmcache": plan.no_lmcache},
    }
    return told


def _overlap(measured: Mapping[str, Samples]) -> dict[str, Any]:
    """The option against the default. "burst" are prompts that come together beside running requests, "fresh"
    are prompts that nobody has."""
    times = [name for name in measured if name != "steps"]
    told: dict[str, Any] = {
        f"{name}_overlap_vs_async": _ratio(measured[name], OVERLAP, KVWIRE) for name in times
    }
    told["burst_ttft_vs_without"] = _ratio(measured["burst_ttft"], KVWIRE, WITHOUT)
    told["idle_steps_overlap_vs_without"] = _ratio(measured["steps"], OVERLAP, WITHOUT)
    told |= {f"{name}_ms": _milliseconds(measured[name]) for name in times}
    return told


def _milliseconds(samples: Samples) -> dict[str, float]:
    return {name: round(stats.median(each) * 1e3, 2) for name, each in samples.items()}


def _ratio(samples: Samples, upper: str, lower: str) -> float | None:
    if upper not in samples or lower not in samples:
        return None
    return round(stats.median_ratio(samples[upper], samples[lower]), 3)
