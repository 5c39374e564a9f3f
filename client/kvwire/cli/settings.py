"""Settings of a program: one frozen dataclass, filled from flags > KVWIRE_* > YAML > its own defaults.

The YAML file has one section per program (`server:`, `client:`). A field's type says how its text is read: an
int takes sizes ("1GiB"), a float takes times ("30s"), a tuple takes commas. A bad value is a ConfigError that
names the setting, the value, where it came from, and what to write. The dataclass's own checks raise
ConfigError from `__post_init__`, with `setting=` naming the field.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvwire.cli import units
from kvwire.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Mapping

S = TypeVar("S")
T = TypeVar("T")

ENV_PREFIX: Final = "KVWIRE_"
CONFIG_ENV: Final = "KVWIRE_CONFIG"
SECTIONS: Final = ("server", "client", "coordinator")
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
_HIDDEN: Final = "(not shown)"


def setting(text: str, default: T, unit: str = "", *, secret: bool = False) -> T:
    """A field of a settings dataclass. `text` is its help; `unit` is "bytes", "seconds" or "" (a number)."""
    told = {"help": text, "unit": unit, "secret": secret}
    found: T = dataclasses.field(default=default, metadata=told)
    return found


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of one field."""

    name: str
    kind: Any
    default: Any
    help: str
    unit: str
    secret: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    def shown(self, value: Any) -> str:
        """The value as one would type it."""
        if value is None or value in {"", ()}:
            return ""
        if self.secret:
            return _HIDDEN
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        if isinstance(value, bool):
            return str(value).lower()
        if self.unit == "bytes" or (not self.unit and isinstance(value, int) and value >= 1 << 20):
            return units.exact_size(value)
        return units.exact_duration(value) if self.unit == "seconds" else str(value)


def settings_of(cls: type) -> tuple[Setting, ...]:
    """The settings of a dataclass, in its order. Every field needs a default."""
    kinds = typing.get_type_hints(cls)
    return tuple(
        Setting(
            field.name,
            kinds[field.name],
            field.default,
            str(field.metadata.get("help", "")),
            str(field.metadata.get("unit", "")),
            bool(field.metadata.get("secret", False)),
        )
        for field in dataclasses.fields(cls)
    )


def load_settings(
    cls: type[S],
    flags: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    yaml_path: str | Path | None = None,
    *,
    section: str = "",
) -> tuple[S, dict[str, str]]:
    """The settings, and for each field where its value comes from.

    `flags` holds what was typed; None values were not. `env` is the process's by default. Without `yaml_path`
    the file is the one that KVWIRE_CONFIG names, if any. `section` empty: the file is not divided.
    """
    env = os.environ if env is None else env
    flags = {name: value for name, value in (flags or {}).items() if value is not None}
    path = yaml_path or env.get(CONFIG_ENV) or None
    in_file = read_yaml(Path(path), section) if path else {}
    known = {each.name: each for each in settings_of(cls)}
    _refuse_unknown(in_file, known, f"{path}")

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, each in known.items():
        if name in flags:
            origins[name], given = each.flag, flags[name]
        elif each.env in env:
            origins[name], given = each.env, env[each.env]
        elif name in in_file:
            origins[name], given = f"{path}", in_file[name]
        else:
            origins[name] = "default"
            continue
        values[name] = parse_value(each, given, origins[name])
    return _checked(cls, values, origins), origins


def _checked(cls: type[S], values: dict[str, Any], origins: dict[str, str]) -> S:
    try:
        return cls(**values)
    except ConfigError as error:
        origin = origins.get(error.metadata.get("setting", ""), "default")
        if origin == "default" or origin.startswith("--"):
            raise
        raise ConfigError(f"{error} The value comes from {origin}.", **error.metadata) from error


def parse_value(each: Setting, given: object, origin: str) -> Any:
    """Text (or, from flags, already typed values) as the type of the field."""
    try:
        return _convert(each.kind, given)
    except ValueError as error:
        shown = _HIDDEN if each.secret else repr(given)
        where = each.flag if origin == each.flag else f"{each.flag} (from {origin})"
        raise ConfigError(f"{where} {shown} {error}.", setting=each.name) from error


def _convert(kind: Any, given: object) -> Any:
    origin = typing.get_origin(kind)
    if origin in {UnionType, typing.Union}:
        inner = [option for option in typing.get_args(kind) if option is not NoneType]
        return None if given in {"", "null", "none"} else _convert(inner[0], given)
    if origin is tuple:
        parts = given.split(",") if isinstance(given, str) else given
        if not isinstance(parts, list | tuple):
            raise ValueError("is not a list")
        items = [part for text in parts for part in str(text).split(",") if part.strip()]
        return tuple(_convert(typing.get_args(kind)[0], item.strip()) for item in items)
    if not isinstance(given, str):
        given = str(given)
    return _scalar(kind, given)


def _scalar(kind: Any, text: str) -> Any:
    if kind is bool:
        if text.lower() not in _TRUE | _FALSE:
            raise ValueError("is neither true nor false")
        return text.lower() in _TRUE
    if kind is int:
        return units.parse_size(text)
    if kind is float:
        return units.parse_duration(text)
    return text


def read_yaml(path: Path, section: str = "") -> dict[str, object]:
    """The section as text: lists, mappings and strings. Raises ConfigError naming the file."""
    try:
        import yaml
    except ImportError as error:
        raise MissingExtra("A settings file", "cli") from error
    try:
        # The base loader leaves every scalar a string, so that 0:80 is no number and `no` is no boolean.
        document = yaml.BaseLoader(path.read_text()).get_single_data()
    except OSError as error:
        raise ConfigError(
            f"The settings file {path} cannot be read: {error.strerror}.", setting="config"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"The settings file {path} is not YAML: {error}", setting="config") from error
    content = _mapping(document, f"{path}")
    if not section:
        return content
    unknown = sorted(content.keys() - set(SECTIONS))
    if unknown:
        raise ConfigError(
            f"{path}: {unknown[0]!r} is no section; the sections are {', '.join(SECTIONS)}.", setting="config"
        )
    return {name.replace("-", "_"): value for name, value in _mapping(content.get(section), section).items()}


def _mapping(node: object, where: str) -> dict[str, object]:
    if node in (None, ""):
        return {}
    if not isinstance(node, dict):
        raise ConfigError(f"{where}: settings are written as NAME: VALUE.", setting="config")
    return {str(name): value for name, value in node.items()}


def _refuse_unknown(in_file: Mapping[str, object], known: Mapping[str, Setting], where: str) -> None:
    for name in in_file:
        if name not in known:
            raise ConfigError(f"{where}: {name!r} is no setting. {_nearest(name, known)}", setting=name)


def _nearest(name: str, known: Mapping[str, Setting]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known, 1)
    return f"Did you mean {close[0]!r}?" if close else "`kvwire config show` lists the settings."
