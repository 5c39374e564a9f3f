"""Sizes and times as people write them."""

from __future__ import annotations

import re
from typing import Final

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b?)", re.IGNORECASE)
_TIME: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|min|m|h|d)?", re.IGNORECASE)
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_POWER: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_BINARY: Final = ("KiB", "MiB", "GiB", "TiB")


def parse_size(text: str) -> int:
    """ "64k", "64KiB" and "64K" are 65536, "64KB" is 64000, "1.5GiB" is exact. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("is not a size: write bytes, or a number with KiB, MiB, GiB or TiB")
    number, prefix, suffix = match.groups()
    base = 1000 if suffix.lower() == "b" and prefix else 1024
    factor = int(base ** _POWER[prefix.lower()])
    if "." not in number:
        return int(number) * factor
    value = float(number) * factor
    if value != int(value):
        raise ValueError("is not a whole number of bytes")
    return int(value)


def parse_duration(text: str) -> float:
    """Seconds of "30s", "500ms", "2min", "1h30m" or a bare number. Raises ValueError."""
    rest = text.strip()
    total = 0.0
    while rest:
        match = _TIME.match(rest)
        if match is None or (match[2] is None and match[0] != text.strip()):
            break
        total += float(match[1]) * _SECONDS[(match[2] or "s").lower()]
        rest = rest[match.end() :].lstrip()
    if rest or not text.strip():
        raise ValueError("is not a time: write seconds, or a number with ms, s, min, h or d")
    return total


def format_size(size: int) -> str:
    """The shortest text with at most one decimal, such as "1.5 GiB"."""
    value = float(size)
    for unit in ("B", *_BINARY):
        if value < 1024 or unit == _BINARY[-1]:
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}".replace(".0 ", " ")


def exact_size(size: int) -> str:
    """A text that `parse_size` turns back into the same number."""
    for power in range(len(_BINARY), 0, -1):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{_BINARY[power - 1]}"
    return str(size)


def format_duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def exact_duration(seconds: float) -> str:
    """A text that `parse_duration` turns back into the same number."""
    return f"{seconds:.12g}s" if seconds >= 1 or not seconds else f"{seconds * 1000:.12g}ms"
