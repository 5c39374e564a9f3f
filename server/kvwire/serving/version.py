from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

PROTOCOL_VERSIONS: Final = (1,)
"""Minor versions of kvwire.v1 that this server speaks."""


@cache
def server_version() -> str:
    try:
        return version("kvwire")
    except PackageNotFoundError:
        return "unknown"
