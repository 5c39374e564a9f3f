"""Who changed what, in the log of either program."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("kvwire.audit")


def audit(context: Any, action: str, **facts: object) -> None:
    """A tenant is told by its digest, a prompt by the number of its chunks."""
    told = " ".join(f"{name}={value}" for name, value in facts.items())
    log.info("%s by %s: %s", action, context.peer(), told)
