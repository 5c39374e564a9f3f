"""Results for people (tables) and for programs (JSON), on stdout; progress on stderr."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Output = Annotated[
    Literal["table", "json"], Parameter(name=("--output", "-o"), help="For people, or for programs.")
]
_WIDE = 200


class PipedConsole(Console):
    """Leaves a reader that goes away (`| head`) to the program, which ends without an error."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """Writes tables. Into a pipe they are as wide as they need to be."""
    # Without markup: "kvwire[otel]" is a name here, not a style.
    made = PipedConsole(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = _WIDE
    return made


def print_json(value: object) -> None:
    sys.stdout.write(json.dumps(plain(value), indent=2) + "\n")


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Names and values below each other."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in fields:
        table.add_row(name, value)
    console().print(table)


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
    """A table. Columns whose name ends in a unit or starts with # are aligned to the right."""
    table = Table(box=None, pad_edge=False, title=title or None, title_justify="left", title_style="bold")
    for name in columns:
        table.add_column(
            name.lstrip("#"), justify="right" if name.startswith("#") else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(str(value) for value in row))
    console().print(table)


def plain(value: Any) -> Any:
    """What json.dumps takes: messages and dataclasses as dicts, bytes as hex, enums as lower-case names.

    Durations are seconds, timestamps ISO 8601, 64-bit integers numbers.
    """
    if isinstance(value, Message):
        return _message(value)
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _message(message: Message) -> Any:
    kind = message.DESCRIPTOR.full_name
    if kind == "google.protobuf.Duration":
        return message.seconds + message.nanos / 1e9  # type: ignore[attr-defined]
    if kind == "google.protobuf.Timestamp":
        return message.ToJsonString()  # type: ignore[attr-defined]
    return {
        field.name: _field(message, field)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.enum_type is not None:
        return [enum_name(field, each) for each in value] if field.is_repeated else enum_name(field, value)
    return [plain(each) for each in value] if field.is_repeated else plain(value)


def enum_name(field: Any, number: int) -> str:
    """DATA_PATH_UCX_LOCAL is "ucx-local", UNSPECIFIED is "", a number of a newer version is that number."""
    names = field.enum_type.values_by_number
    if number not in names:
        return str(number)
    prefix = names[0].name.removesuffix("UNSPECIFIED")
    short: str = names[number].name.removeprefix(prefix)
    return "" if short == "UNSPECIFIED" else short.lower().replace("_", "-")
