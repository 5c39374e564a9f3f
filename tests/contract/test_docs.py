"""What docs/protocol.md states in numbers is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from kvwire.keys.namespace import MAX_FIELD_BYTES
from kvwire.server import limits
from kvwire.server.config import ServerConfig
from kvwire.server.dataplane.inline import PIECE_BYTES
from kvwire.server.layout import MAX_GROUPS
from kvwire.transfer import shm, tags
from kvwire.v1 import error_reason_pb2

PAGE = (Path(__file__).parents[2] / "docs/protocol.md").read_text()
REASONS = error_reason_pb2.ErrorReason.DESCRIPTOR.values_by_name
UNITS = {"MiB": 1 << 20, "bytes": 1, "tokens": 1, "s": 1, "": 1}
FIXED = {
    "namespace strings": MAX_FIELD_BYTES,
    "pieces of a ticket": tags.MAX_PIECE + 1,
    "extra inputs of a lookup": limits.MAX_EXTRA_INPUTS,
    "extra inputs that cover one token": limits.MAX_EXTRA_DEPTH,
    "versions, digests or offers that a client lists": limits.MAX_OFFERED,
    "KV groups of a layout": MAX_GROUPS,
}
LIFETIMES = {
    "registration": "registration_ttl",
    "session": "session_ttl",
    "lookup lease": "lookup_lease",
    "read lease": "read_lease",
    "write lease": "write_lease",
}


def section(title):
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, title
    return found.group(1)


def rows(title):
    """The cells of the section's tables, without head and rule."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [each for each in cells if not set(each[0]) <= {"-"}][1:]


def number(text):
    power = re.fullmatch(r"2\^(\d+)", text)
    if power:
        return 2 ** int(power.group(1))
    digits, _, unit = text.partition(" ")
    return int(digits.replace(",", "")) * UNITS[unit]


def test_the_limits_are_the_defaults():
    config = ServerConfig()
    stated = {}
    for what, default, flag, reason in rows("Limits"):
        stated[what] = default
        if flag and default != "the arena":
            name = flag.strip("`").removeprefix("--").replace("-", "_")
            assert getattr(config, name) == number(default), what
        elif what in FIXED:
            assert FIXED[what] == number(default), what
        code = re.search(r"[A-Z_]+", reason).group()
        assert code == "RESOURCE_EXHAUSTED" or f"ERROR_REASON_{code}" in REASONS
    assert FIXED.keys() <= stated.keys()
    flags = {flag for _, _, flag, _ in rows("Limits") if flag}
    names = [name for name in ServerConfig.__dataclass_fields__ if name.startswith("max_")]
    assert {f"`--{name.replace('_', '-')}`" for name in names} <= flags


def test_the_lifetimes_are_the_defaults():
    config = ServerConfig()
    stated = {what: default for what, _, default in rows("Lifetimes")}
    for what, name in LIFETIMES.items():
        assert getattr(config, name) == number(stated[what]), what


def test_the_arenas_header():
    arena = shm.SharedArena.create(1 << 20, incarnation=b"I" * 16)
    try:
        header = (shm.FOLDER / arena.name).read_bytes()[: shm.HEADER_BYTES]
    finally:
        arena.unlink()
        arena.close()
    told = {}
    for place, content in rows("SHM: the arena"):
        first, last = map(int, re.findall(r"\d+", place))
        told[content.split(",")[0]] = header[first : last + 1]
    ends = [int(re.findall(r"\d+", place)[1]) for place, _ in rows("SHM: the arena")]
    assert ends[-1] == shm.HEADER_BYTES - 1
    assert told["ASCII `KVWARENA`"] == b"KVWARENA"
    assert int.from_bytes(told["size of the whole arena in bytes"], "little") == arena.size
    assert int.from_bytes(told["end of what has memory behind it"], "little") == shm.HEADER_BYTES
    assert told["the server's incarnation"] == b"I" * 16
    assert told["the nonce"] == arena.nonce
    assert not any(told["zero"])


def test_the_tags_of_ucx():
    drawn = re.findall(r"(kind|lease|piece) \((\d+)\)", section("UCX: tags"))
    widths = {name: int(bits) for name, bits in drawn}
    assert widths == {"kind": 8, "lease": 32, "piece": 24}
    assert widths["lease"] + widths["piece"] == tags.KIND_SHIFT
    assert widths["piece"] == tags.LEASE_SHIFT
    kinds = {int(kind): meaning for kind, meaning, *_ in rows("UCX: tags") if kind.isdigit()}
    for kind in tags.Kind:
        assert kinds[int(kind)].lower().startswith(kind.name.lower())


def test_pieces_of_the_inline_path():
    assert PIECE_BYTES == 1 << 20
    assert "pieces of at most 1 MiB" in section("What a data path must do")


def test_the_calls_that_are_never_refused_for_load():
    told = section("Limits").partition("`Ping`")
    named = set(re.findall(r"`(\w+)`", "`Ping`" + told[2].partition("are never")[0]))
    assert named == limits.UNLIMITED
