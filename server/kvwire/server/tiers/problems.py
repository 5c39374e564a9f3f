from __future__ import annotations

import logging

log = logging.getLogger("kvwire.server")


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
        if not self.now:
            log.warning("%s %s: %s", self._who, what, error)
        self.now = f"{what}: {error}"

    def works(self) -> None:
        if self.now:
            log.info("%s works again", self._who)
            self.now = ""

    def dropped(self, name: str, why: str) -> None:
        log.warning("%s: dropped %s: %s", self._who, name, why)
