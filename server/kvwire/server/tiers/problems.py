from __future__ import annotations

import logging
from typing import Final

log = logging.getLogger("kvwire.server")

SHOWN: Final = 300


class Problems:
    """What goes wrong with one tier, until something works again. Each new one is logged once."""

    def __init__(self, name: str, location: str) -> None:
        self.now = ""
        self._found = ""
        self._who = f"L2 {name} at {location}"

    @property
    def told(self) -> str:
        """For people: what goes wrong now, or what was found and stays to be known."""
        return self.now or self._found

    def found(self, what: str) -> None:
        """Something that nothing that works makes good. It is logged once."""
        if not self._found:
            log.warning("%s %s", self._who, what)
        self._found = what

    def failed(self, what: str, error: Exception | str) -> None:
        """`what` is a part of a sentence about the tier."""
        why = " ".join(str(error).split())[:SHOWN]
        if not self.now:
            log.warning("%s %s: %s", self._who, what, why)
        self.now = f"{what}: {why}"

    def note(self, what: str) -> None:
        """Something to know that is no problem."""
        log.warning("%s %s", self._who, what)

    def works(self) -> None:
        if self.now:
            log.info("%s works again", self._who)
            self.now = ""

    def dropped(self, name: str, why: str) -> None:
        log.warning("%s: dropped %s: %s", self._who, name, why)
