"""The rounds of `kvwire bench engine`: engines that take turns, and what each of them showed."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING, Final, TypeAlias

from kvwire.cli.bench.processes import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvwire.cli.bench.engine import Plan
    from kvwire.cli.bench.engine_models import Model
    from kvwire.cli.bench.engine_process import EngineProcess

Samples: TypeAlias = "dict[str, list[float]]"
"""By the engine's name, one per round."""

WITHOUT: Final = "without"
KVWIRE: Final = "kvwire"
OVERLAP: Final = "kvwire-overlap"
LMCACHE: Final = "lmcache"

PROMPTS: Final = 3
COMPARED_TOKENS: Final = 8
IDLE_REQUESTS: Final = 4
IDLE_PROMPT_TOKENS: Final = 16
"""Shorter than any chunk: there is nothing to look up, to load or to store."""
STRETCH_S: Final = 0.2
STRETCHES: Final = 3
"""Of idle steps in each round: what they differ by is smaller than what other load does to one of them."""
STEP_COUNTS: Final = (10, 400)


class Bench:
    """The rounds. What each engine showed is kept by its name, one sample per round."""

    def __init__(
        self,
        plan: Plan,
        model: Model,
        engines: Mapping[str, EngineProcess],
        progress: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self.model = model
        self._engines = engines
        self._progress = progress
        self._source = random.Random(7)  # noqa: S311  no secret
        self._prompts = [self._prompt(self._source, plan.prompt_tokens) for _ in range(PROMPTS)]
        self._short = [self._prompt(self._source, IDLE_PROMPT_TOKENS) for _ in range(IDLE_REQUESTS)]
        self.reused: dict[str, int] = {}
        self.identical: dict[str, bool] = {}

    def fill(self) -> None:
        """Every cache gets the prompts and gives them back, and what is said then is compared."""
        said: dict[str, list[list[int]]] = defaultdict(list)
        for name, process in self._engines.items():
            self._progress(f"filling {name}")
            for prompt in self._prompts:
                process.ask("answer", tokens=prompt, max_tokens=1)
                again = process.ask("answer", tokens=prompt, max_tokens=COMPARED_TOKENS)
                self._note_reuse(name, again["cached_tokens"])
                said[name].append(again["token_ids"])
        self.identical = {name: each == said[WITHOUT] for name, each in said.items()}
        if not self.identical[KVWIRE] or not self.identical.get(OVERLAP, True):
            raise BenchError("An engine with kvwire does not say what the one without it says.")

    def _note_reuse(self, name: str, tokens: int) -> None:
        if name != WITHOUT and not tokens:
            raise BenchError(f"The engine {name} found nothing of a prompt that it had stored.")
        self.reused[name] = tokens

    def measure(self) -> dict[str, Samples]:
        found = {"ttft": self.first_tokens(), "steps": self.idle_steps()}
        if self._plan.overlap:
            # Before the bursts, in which only an engine without a cache computes long prompts.
            found["fresh_ttft"], found["fresh_stored"] = self.fresh()
            found["burst_ttft"], found["burst_longest_step"] = self.bursts()
        return found

    def first_tokens(self) -> Samples:
        """Seconds to the first token of a prompt that every cache has."""
        samples: Samples = defaultdict(list)
        for number, name, process in self._turns("time to first token"):
            prompt = self._prompts[number % PROMPTS]
            answer = process.ask("answer", tokens=prompt, max_tokens=1)
            if answer["cached_tokens"] != self.reused[name]:
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

    def _prompt(self, source: random.Random, length: int) -> list[int]:
        return [source.randrange(3, self.model.vocabulary) for _ in range(length)]
