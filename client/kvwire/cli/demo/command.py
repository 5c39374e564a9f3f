"""`kvwire demo`."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from kvwire.cli.demo import children, report
from kvwire.cli.demo.scenario import Options, play
from kvwire.cli.demo.steps import Steps
from kvwire.errors import ConfigError, MissingExtra

TEXT = """One engine stores a prompt's KV, a fresh one finds it: real vLLM, a real model, a real document.

Starts a cache server, runs vLLM engine A and then a fresh engine B on this project's LICENSE, and B once
more without kvwire, each in a process of its own, in float32. The model (Gemma 3 270M, Gemma Terms of Use) is
downloaded on first use and kept in the user's cache folder. Exit status 0: the outputs are identical, at
least 90 % of B's prompt came from kvwire, and the bytes went by the path asked for. With --fleet there are a
coordinator and two servers: A is at one, B at the other, and all that B finds has to come from A's server.
"""

MODEL_HELP = (
    "Folder of another model, in Hugging Face's format. Without it: Gemma 3 270M, under the Gemma Terms of "
    "Use, downloaded on first use into the cache folder."
)

command = App(name="demo", help=TEXT, help_format="plaintext", version_flags=())


@command.default
def demo(
    *,
    fleet: Annotated[
        bool, Parameter(help="Two servers and a coordinator: B's server gets it from A's.", negative=())
    ] = False,
    path: Annotated[
        Literal["shm", "ucx", "inline"], Parameter(help="How the bytes move between engine and server.")
    ] = "shm",
    model: Annotated[Path | None, Parameter(help=MODEL_HELP, show_default=False)] = None,
    document: Annotated[
        Path | None, Parameter(help="Another text for the prompt.", show_default=False)
    ] = None,
    max_tokens: Annotated[int, Parameter(help="Tokens to generate.")] = 32,
    l1_size: Annotated[str, Parameter(help="Size of the server's memory tier.")] = "1GiB",
    json: Annotated[bool, Parameter(help="Print the outcome as JSON.", negative=())] = False,
) -> int:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "The demo runs real vLLM, which is not installed here. In a clone of the repository `make demo` "
            "installs it for the CPU; elsewhere install vLLM beside kvwire.",
            extra="vllm",
        )
    if fleet and importlib.util.find_spec("ucxx") is None:
        raise MissingExtra("Servers that share with each other", "ucx-cu12")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = Options(path, model, document, max_tokens, l1_size, fleet)
    work = Path(tempfile.mkdtemp(prefix="kvwire-demo-"))
    keep = False
    try:
        outcome = play(options, work, Steps())
        if json:
            sys.stdout.write(report.as_json(outcome) + "\n")
        else:
            report.print_table(outcome)
        keep = bool(outcome.problems)
    except (children.ChildFailed, TimeoutError) as error:
        sys.stderr.write(f"kvwire demo: {error}\n")
        keep = True
    finally:
        if not keep:
            shutil.rmtree(work, ignore_errors=True)
    if keep:
        sys.stderr.write(f"The logs of the servers and the engines are in {work}\n")
    return int(keep)
