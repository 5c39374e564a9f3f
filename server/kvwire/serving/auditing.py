"""Who changed what, in the log of either program."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("kvwire.audit")


def audit(context: Any, action: str, **facts: object) -> None:
    """A tenant is told by its digest, a prompt by the number of its chunks."""
    told = {"peer": context.peer(), **_identity(context), **facts}
    log.info("%s %s", action, " ".join(f"{name}={value}" for name, value in told.items()))


def _identity(context: Any) -> dict[str, str]:
    """Whose certificate was shown, where one was asked for."""
    names = list(context.peer_identities() or ())
    return {"certificate": ascii(b",".join(names).decode(errors="replace"))} if names else {}
