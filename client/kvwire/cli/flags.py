"""Commands whose flags are the fields of a settings dataclass."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeVar

from cyclopts import App, Parameter

from kvwire.cli.settings import CONFIG_ENV, Setting, load_settings, settings_of

if TYPE_CHECKING:
    from collections.abc import Callable

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")

PROGRAMS: dict[str, type] = {}
"""Section -> settings of the programs whose command has been loaded, for `kvwire config show`."""

CONFIG_FLAG = "config_file"


def settings_command(
    name: str, cls: type[S], run: Callable[[S], int | None], *, text: str, section: str = ""
) -> App:
    """A program's command: one flag per setting. `text` is its help; `run` returns the exit code."""
    PROGRAMS[section or name] = cls

    def program(settings: S) -> int:
        return run(settings) or 0

    app = command_app(name, text)
    app.default(with_settings(cls, section or name)(program))
    return app


def command_app(name: str, text: str) -> App:
    """`text` is the help; its first sentence stands in the list of commands."""
    return App(name=name, help=unwrapped(text), help_format="plaintext", version_flags=())


def unwrapped(text: str) -> str:
    """Paragraphs as single lines, which the terminal wraps; indented lines are examples and stay."""
    text = re.sub(r"(?<=\S)\n(?=\S)", " ", text)
    # The help would lose the indentation of a paragraph's first line.
    return re.sub(r"\n\n(?=  )", "\n\nFor example:\n", text)


def with_settings(cls: type[S], section: str) -> Callable[[Callable[Concatenate[S, P], R]], Callable[..., R]]:
    """Decorates `command(settings, *, own=...)`: its flags are its own parameters and one per setting."""

    def decorate(function: Callable[Concatenate[S, P], R]) -> Callable[..., R]:
        def command(flags: dict[str, Any], path: str | None, *args: Any, **own: Any) -> R:
            settings, _origins = load_settings(cls, flags, yaml_path=path, section=section)
            return function(settings, *args, **own)

        return _take_flags(command, cls, _own_parameters(function, 1))

    return decorate


def with_flags(cls: type, function: Callable[..., R]) -> Callable[..., R]:
    """As `with_settings`, for `command(flags, path, *, own=...)`: what was typed, and the settings file."""
    return _take_flags(function, cls, _own_parameters(function, 2))


def _take_flags(function: Callable[..., R], cls: type, own: list[inspect.Parameter]) -> Callable[..., R]:
    """Flags are read as text: they, the environment and the file go through one parser."""
    settings = settings_of(cls)

    def command(*args: Any, **flags: Any) -> R:
        path = flags.pop(CONFIG_FLAG, None)
        given = {each.name: flags.pop(each.name, None) for each in settings}
        return function(given, path, *args, **flags)

    parameters = [*own, *map(_parameter, settings), _config_parameter()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _own_parameters(function: Callable[..., Any], skip: int) -> list[inspect.Parameter]:
    """All but the first ones, with their annotations evaluated."""
    own = list(inspect.signature(function).parameters.values())[skip:]
    named = {each.name: each.annotation for each in own}
    scope = getattr(function, "__globals__", {})
    kinds = {name: eval(text, scope) if isinstance(text, str) else text for name, text in named.items()}  # noqa: S307
    return [each.replace(annotation=kinds[each.name]) for each in own]


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
