"""`kvwire config`."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from kvwire.cli import render
from kvwire.cli.app import ENTRY_POINTS
from kvwire.cli.connect import ClientSettings
from kvwire.cli.flags import PROGRAMS, command_app, with_flags
from kvwire.cli.settings import CONFIG_ENV, ENV_PREFIX, load_settings, settings_of

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT = """Which settings hold, and where each comes from.

  kvwire config show
  KVWIRE_L1_SIZE=8GiB kvwire config show server
  kvwire config show server --l1-size 2GiB --config kvwire.yaml -o json"""
SHOW_TEXT = """The effective settings of each program, and where each comes from.

Flags win over KVWIRE_* variables, those over the file, the file over the defaults. With a program's name its
own flags may follow, to see what they would do.

  kvwire config show --config kvwire.yaml
  kvwire config show server --l1-size 2GiB

A file has a section for each program:
  server:
    listen: [unix:/run/kvwire.sock, 127.0.0.1:7470]
    l1_size: 8GiB
  client:
    address: unix:/run/kvwire.sock"""

command = command_app("config", TEXT)
show = command_app("show", SHOW_TEXT)
command.command(show)


def programs() -> dict[str, type]:
    """Section -> settings, of the client and of every program that is installed here."""
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except ImportError:
            # A client's installation knows the entry point and lacks what the program needs.
            continue
    return {**dict(sorted(PROGRAMS.items(), reverse=True)), "client": ClientSettings}


@show.default
def show_all(
    *,
    config: Annotated[
        str, Parameter(help=f"YAML file with settings. [env: {CONFIG_ENV}]", show_default=False)
    ] = "",
    output: render.Output = "table",
) -> int:
    known = programs()
    shown = {section: described(cls, {}, config, section) for section, cls in known.items()}
    _print(shown, output)
    return 0


def described(
    cls: type[object], flags: dict[str, Any], path: str | None, section: str
) -> list[dict[str, str]]:
    settings, origins = load_settings(cls, flags, yaml_path=path or None, section=section)
    return [
        {
            "setting": each.name,
            "value": each.shown(getattr(settings, each.name)),
            "origin": origins[each.name],
            "help": each.help,
        }
        for each in settings_of(cls)
    ]


def unused_variables() -> list[str]:
    """KVWIRE_* variables that no installed program reads: mostly misspelt ones."""
    known = {each.env for cls in programs().values() for each in settings_of(cls)} | {CONFIG_ENV}
    return sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known)


def _print(shown: dict[str, list[dict[str, str]]], output: str) -> None:
    if output == "json":
        render.print_json(
            {
                section: {row["setting"]: {"value": row["value"], "origin": row["origin"]} for row in rows}
                for section, rows in shown.items()
            }
        )
        return
    for section, rows in shown.items():
        render.print_rows(
            (f"{section} setting", "value", "from", "what it is"),
            [(row["setting"], row["value"] or "-", row["origin"], row["help"]) for row in rows],
        )
        render.console().print()
    unused = unused_variables()
    if unused:
        render.console(stderr=True).print(f"No program here reads {', '.join(unused)}: misspelt?")


def _show_one(section: str, cls: type) -> Callable[..., int]:
    def show_one(flags: dict[str, Any], path: str | None, *, output: render.Output = "table") -> int:
        _print({section: described(cls, flags, path, section)}, output)
        return 0

    return with_flags(cls, show_one)


for _section, _cls in programs().items():
    _app = command_app(_section, f"The settings of `{_section}`, with flags as if it were started by them.")
    _app.default(_show_one(_section, _cls))
    show.command(_app)
