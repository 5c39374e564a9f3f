"""The command `kvwire`: finds the subcommand, loads only that, turns errors into messages and exit codes."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points, version
from typing import TYPE_CHECKING, Final

from kvwire.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidArgument,
    KvwireError,
    MissingExtra,
    TokensInvalid,
    Unavailable,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cyclopts import App

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3
INTERRUPTED: Final = 130

ENTRY_POINTS: Final = "kvwire.commands"
TEXT: Final = """A KV-cache service for LLM serving: gRPC carries tickets, UCX or shared memory moves
the tensors.

Start a server, and look at it from another terminal:
  kvwire server --listen 127.0.0.1:7470
  kvwire status --address 127.0.0.1:7470

Settings come from flags, then KVWIRE_* variables, then a YAML file (--config), then defaults;
`kvwire config show` tells which. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 server not reachable."""

COMMANDS: Final = (
    (
        "status",
        "kvwire.cli.commands.status:command",
        "What a server holds, who uses it, and whether it is well.",
    ),
    ("ping", "kvwire.cli.commands.ping:command", "Is a server there, and how fast does it answer?"),
    ("lookup", "kvwire.cli.commands.lookup:command", "How much of a prompt has a server cached?"),
    ("members", "kvwire.cli.commands.members:command", "Which servers are in a fleet, and do they report?"),
    ("locate", "kvwire.cli.commands.locate:command", "Which servers of a fleet hold a prompt's chunks?"),
    ("events", "kvwire.cli.commands.events:command", "What do the servers of a fleet report?"),
    ("blend", "kvwire.cli.commands.blend:command", "Which cached chunks occur anywhere in a prompt?"),
    (
        "objects",
        "kvwire.cli.commands.objects:command",
        "Which chunks has a server cached, and whose?",
    ),
    ("pin", "kvwire.cli.commands.pin:command", "Keep the chunks of a prompt in memory."),
    ("quota", "kvwire.cli.commands.quota:command", "How much may each tenant have, and how much has it?"),
    ("prefetch", "kvwire.cli.commands.prefetch:command", "Bring a prompt's chunks into a server's memory."),
    ("evict", "kvwire.cli.commands.evict:command", "Drop the chunks of one prompt."),
    (
        "clear",
        "kvwire.cli.commands.clear:command",
        "Drop what a server has cached: of one model or tenant, or everything.",
    ),
    ("config", "kvwire.cli.commands.config:command", "Which settings hold, and where each comes from."),
    (
        "bench",
        "kvwire.cli.bench.command:command",
        "Measure calls, data paths, engines or a coordinator, each beside a yardstick.",
    ),
    ("demo", "kvwire.cli.demo.command:command", "Two vLLM engines share a prompt's KV through a server."),
)
PROGRAMS: Final = {
    "server": "Run a cache server.",
    "coordinator": "Run a coordinator for a fleet of servers.",
}


def build_app(asked: str = "") -> App:
    """All commands by name and help; a module is imported when its command is asked for.

    The short help given here would replace the command's own, so the one asked for goes without.
    """
    from cyclopts import App

    from kvwire.cli.flags import unwrapped

    app = App(name="kvwire", help=unwrapped(TEXT), help_format="plaintext", version=lambda: version("kvwire"))
    installed = {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}
    programs = [(name, path, PROGRAMS.get(name, "")) for name, path in sorted(installed.items())]
    for name, path, text in (*programs, *COMMANDS):
        app.command(path, name=name, help=None if name == asked else text)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except KvwireError as error:
        return fail(error, exit_code(error))
    except ImportError as error:
        missing = error.__cause__ or error
        return fail(f"{missing}. An optional part is missing: see the README for the extras.", USAGE)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted. Nothing may be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def run(argv: Sequence[str]) -> int:
    try:
        app = build_app(argv[0] if argv else "")
    except ImportError as error:
        raise MissingExtra("The command line", "cli") from error
    from cyclopts.exceptions import CycloptsError, UnknownCommandError

    try:
        result = app(argv, exit_on_error=False, print_error=False, result_action="return_value")
    except UnknownCommandError as error:
        return fail(unknown_command(error.unused_tokens or [], error.app or app), USAGE)
    except CycloptsError as error:
        return fail(f"{error} Try --help.", USAGE)
    return result if isinstance(result, int) else OK


def unknown_command(typed: Sequence[str], app: App) -> str:
    """cyclopts' own text would import every command."""
    import difflib

    word = typed[0] if typed else ""
    known = [name for name in app if not name.startswith("-")]
    close = difflib.get_close_matches(word, known, 1)
    hint = f"Did you mean {close[0]!r}?" if close else f"The commands are {', '.join(sorted(known))}."
    return f"there is no command {word!r}. {hint}"


def exit_code(error: KvwireError) -> int:
    if isinstance(error, Unavailable | DeadlineExceeded):
        return UNREACHABLE
    if isinstance(error, ConfigError | MissingExtra | InvalidArgument | TokensInvalid):
        return USAGE
    return FAILED


def fail(problem: object, code: int) -> int:
    print(f"kvwire: {problem}", file=sys.stderr)
    return code
