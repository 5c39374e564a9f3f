"""Which vLLM the connector was tried with, and what to say of another one."""

from __future__ import annotations

import re
from typing import Final

from kvwire.errors import ConfigError

Release = tuple[int, int]

FIRST: Final[Release] = (0, 32)
LAST: Final[Release] = (0, 32)
"""The first and the last release of vLLM that the end-to-end tests have run with."""


def tried() -> str:
    """The range, for a reader."""
    first, last = (".".join(map(str, release)) for release in (FIRST, LAST))
    return first if first == last else f"{first} to {last}"


def warning(version: str) -> str:
    """What an engine's log should say of its own version; empty for one that was tried."""
    found = re.match(r"(\d+)\.(\d+)\.", f"{version}.")
    if found and FIRST <= (int(found[1]), int(found[2])) <= LAST:
        return ""
    return f"the connector was tried with vLLM {tried()} and not with this one, {version or 'of no version'}"


def unusable(error: ImportError) -> ConfigError:
    """Instead of an import that fails: vLLM is not there, or its connector interface is another one."""
    try:
        import vllm
    except ImportError:
        return ConfigError("kvwire's connector runs inside vLLM, which is not installed here.")
    version = str(getattr(vllm, "__version__", ""))
    return ConfigError(
        f"kvwire's connector does not fit vLLM {version}: it was tried with {tried()}. ({error})",
        vllm=version,
        tried=tried(),
    )
