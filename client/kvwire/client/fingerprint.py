"""The layout fingerprint: a digest of what changes the bytes of a block, so unlike engines never share."""

from __future__ import annotations

import json
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_CPUINFO: Final = Path("/proc/cpuinfo")
_ISA_FLAGS: Final = (
    "amx_tile",
    "amx_bf16",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "avx2",
    "asimd",
    "bf16",
    "sve",
)


def layout_fingerprint(
    *,
    dtype: str,
    block_sizes: Sequence[int],
    page_bytes: Sequence[Sequence[int]],
    order: str,
    device: str,
    facts: Mapping[str, Any] | None = None,
) -> bytes:
    """32 bytes. Block sizes are per KV group, page sizes per group and layer.

    `order` says whether layers or blocks are outermost. On a CPU the instruction set counts too, because
    engines pack the inside of a page for it. `facts` is for what else an engine knows to change its bytes.
    """
    told: dict[str, Any] = {
        "dtype": dtype,
        "block_sizes": list(block_sizes),
        "page_bytes": [list(group) for group in page_bytes],
        "order": order,
        "device": device,
        "isa": list(cpu_isa()) if device == "cpu" else [],
        "facts": dict(facts or {}),
    }
    return digest_of(told)


def digest_of(facts: Mapping[str, Any]) -> bytes:
    """32 bytes for the facts, in whatever order they are told."""
    return sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()


@cache
def cpu_isa() -> tuple[str, ...]:
    """The vector extensions of this CPU that inference kernels choose their packing by."""
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    return isa_of(text)


def isa_of(cpuinfo: str) -> tuple[str, ...]:
    """The same, out of the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() in {"flags", "features"}:
            flags = set(value.split())
            return tuple(flag for flag in _ISA_FLAGS if flag in flags)
    return ()
