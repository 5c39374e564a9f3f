"""What the demo does: A stores, a fresh B finds it, B again without kvwire, and the texts are compared."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import distribution
from typing import TYPE_CHECKING, Any

from kvwire.cli.demo import children, engine
from kvwire.cli.demo.model import prepare_model
from kvwire.cli.demo.server import Traffic, serving, traffic
from kvwire.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from kvwire.cli.demo.steps import Steps

QUESTION = "\n\nQuestion: What is this license called?\nAnswer:"
ENOUGH = 0.9


@dataclass(frozen=True)
class Options:
    path: str
    model: Path | None
    document: Path | None
    max_tokens: int
    l1_size: str
    fleet: bool = False


@dataclass(frozen=True)
class EngineRun:
    """One engine's answer. cached_tokens came from kvwire: the engine's own prefix cache is off."""

    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Shared:
    """What B's server got from A's: hit tokens, and bytes by path. `why_not` is what its status tells."""

    tokens: int
    moved: dict[str, int]
    why_not: str = ""


@dataclass(frozen=True)
class Outcome:
    path: str
    document: str
    model: str
    a: EngineRun
    b: EngineRun
    plain: EngineRun
    traffic: Traffic
    shared: Shared | None = None
    """Of a fleet. `traffic` has then what A stored at its server, and what B retrieved at its own."""

    @property
    def identical(self) -> bool:
        return self.a.token_ids == self.b.token_ids == self.plain.token_ids

    @property
    def share(self) -> float:
        return self.b.cached_tokens / self.b.prompt_tokens

    @property
    def problems(self) -> list[str]:
        """Why the demo did not hold; empty when it did."""
        found = []
        if not self.identical:
            found.append("the three outputs are not identical")
        if self.share < ENOUGH:
            found.append(f"{self.share:.1%} of B's prompt came from kvwire, less than {ENOUGH:.0%}")
        for what, moved in (("stored", self.traffic.stored), ("retrieved", self.traffic.retrieved)):
            others = {name for name in moved if not name.startswith(self.path)}
            if not moved:
                found.append(f"no bytes were {what}")
            elif others:
                found.append(f"bytes were {what} by {', '.join(sorted(others))}, not by {self.path}")
        if self.shared is not None:
            found += self._problems_between_servers(self.shared)
        return found

    def _problems_between_servers(self, shared: Shared) -> list[str]:
        found = []
        if shared.tokens < self.b.cached_tokens:
            found.append(f"only {shared.tokens} of B's {self.b.cached_tokens} tokens came from A's server")
        if not shared.moved:
            why = f": {shared.why_not}" if shared.why_not else ""
            found.append(f"no bytes went from A's server to B's{why}")
        return found


def play(options: Options, work: Path, steps: Steps) -> Outcome:
    """Runs everything, one engine after the other; `work` holds the sockets and the logs."""
    cast = Cast(options, work, steps)
    if options.fleet:
        from kvwire.cli.demo import fleet

        a, b, moved, shared = fleet.play(cast)
    else:
        a, b, moved = one_server(cast)
        shared = None
    plain = cast.run("engine B without kvwire", "engine-plain.log", None)
    document = str(options.document) if options.document else "kvwire's LICENSE"
    return Outcome(options.path, document, cast.model.name, a, b, plain, moved, shared)


def one_server(cast: Cast) -> tuple[EngineRun, EngineRun, Traffic]:
    with serving(cast.work, cast.options.l1_size) as address:
        a = cast.run("engine A, which stores", "engine-a.log", address)
        b = cast.run("engine B, which finds it", "engine-b.log", address)
        return a, b, traffic(address)


class Cast:
    """The engines of one demo: same model, same prompt."""

    def __init__(self, options: Options, work: Path, steps: Steps) -> None:
        self.options = options
        self.work = work
        self.steps = steps
        self._prompt = document_text(options.document) + QUESTION
        self.model = options.model or prepared(steps)

    def run(self, title: str, log: str, address: str | None) -> EngineRun:
        """One engine, at the server of this address or without any."""
        task = {
            "model": str(self.model),
            "prompt": self._prompt,
            "max_tokens": self.options.max_tokens,
            "kv_transfer": connector_config(address, self.options.path) if address else None,
        }
        return run_engine(title, task, self.work / log, self.steps)


def prepared(steps: Steps) -> Path:
    with steps.step("the model, Gemma 3 270M") as update:
        return prepare_model(update)


def run_engine(title: str, task: dict[str, Any], log: Path, steps: Steps) -> EngineRun:
    results: list[EngineRun] = []
    with steps.step(title) as update:

        def on_event(event: dict[str, Any]) -> None:
            if "phase" in event:
                update(event["phase"], None)
            else:
                results.append(EngineRun(**event["result"]))

        children.run("kvwire.cli.demo.engine", task, log, on_event, engine.ENVIRONMENT)
    return results[-1]


def connector_config(address: str, path: str) -> dict[str, Any]:
    """vLLM's --kv-transfer-config for this server: all that a user has to write."""
    return {
        "kv_connector": "KvwireConnector",
        "kv_connector_module_path": "kvwire.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvwire.address": address, "kvwire.data_path": path},
    }


def document_text(path: Path | None) -> str:
    if path is not None:
        try:
            return path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--document {path} cannot be read: {error}", setting="document") from error
    text = distribution("kvwire").read_text("licenses/LICENSE")
    if text is None:
        raise ConfigError(
            "This installation has no LICENSE: name a text with --document FILE.", setting="document"
        )
    return text
