"""Commands whose flags are the fields of a settings dataclass."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import App, Parameter

from kvwire.cli.settings import CONFIG_ENV, Setting, load_settings, settings_of

if TYPE_CHECKING:
    from collections.abc import Callable

S = TypeVar("S")

PROGRAMS: dict[str, type] = {}
"""Section -> settings of the programs whose command has been loaded, for `kvwire config show`."""

CONFIG_FLAG = "config_file"


def settings_command(
    name: str, cls: type[S], run: Callable[[S], int | None], *, text: str, section: str = ""
) -> App:
    """A command with one flag per setting. `text` is its help; `run` returns the exit code."""
    PROGRAMS[section or name] = cls

    def command(**flags: Any) -> int:
        path = flags.pop(CONFIG_FLAG, None)
        settings, _origins = load_settings(cls, flags, yaml_path=path, section=section or name)
        return run(settings) or 0

    give_flags(command, settings_of(cls))
    app = App(name=name, help=text, help_format="plaintext", version_flags=())
    app.default(command)
    return app


def give_flags(
    command: Callable[..., Any], settings: tuple[Setting, ...], *, first: tuple[inspect.Parameter, ...] = ()
) -> None:
    """Make `command(*, NAME=None, ..., config_file=None)` out of a function that takes keywords.

    Flags are read as text, so that flags, environment and file go through one parser and one set of messages.
    `first` are parameters of the command's own.
    """
    parameters = [*first, *(_parameter(each) for each in settings), _config_parameter()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}


def _parameter(each: Setting) -> inspect.Parameter:
    told = [f"[env: {each.env}]"]
    default = each.shown(each.default)
    if default and default != "false":
        told.append(f"[default: {default}]")
    kind: Any = str | None
    if each.kind is bool:
        kind = bool | None
    elif isinstance(each.default, tuple):
        kind = tuple[str, ...] | None
    flag = Parameter(
        name=each.flag, help=" ".join([each.help, *told]), negative_iterable=(), show_default=False
    )
    return _keyword(each.name, Annotated[kind, flag])


def _config_parameter() -> inspect.Parameter:
    told = f"YAML file with settings, a section for each program. [env: {CONFIG_ENV}]"
    flag = Parameter(name="--config", help=told, show_default=False)
    return _keyword(CONFIG_FLAG, Annotated[str | None, flag])


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
