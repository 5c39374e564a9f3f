from __future__ import annotations

import logging
from typing import Final

log = logging.getLogger("kvwire.server")

SHOWN: Final = 300


OPEN: Final = "cannot be used"
READ: Final = "cannot be read"
WRITE: Final = "cannot be written to"
DELETE: Final = "cannot be deleted from"


class Problems:
    """What goes wrong with one tier, until it works again. Each new one is logged once.

    That something else works does not say that it can be opened, or written to.
    """

    def __init__(self, name: str, location: str) -> None:
        self._failing: dict[str, str] = {}
        self._found = ""
        self._who = f"L2 {name} at {location}"

    @property
    def now(self) -> str:
        """Empty: nothing that is known of."""
        return next(iter(self._failing.values()), "")

    @property
    def told(self) -> str:
        """For people: what goes wrong now, or what was found and stays to be known."""
        return self.now or self._found

    @property
    def writable(self) -> bool:
        return WRITE not in self._failing

    def found(self, what: str) -> None:
        """Something that nothing that works makes good. It is logged once."""
        if not self._found:
            log.warning("%s %s", self._who, what)
        self._found = what

    def failed(self, what: str, error: Exception | str) -> None:
        why = " ".join(str(error).split())[:SHOWN]
        if what not in self._failing:
            log.warning("%s %s: %s", self._who, what, why)
        self._failing[what] = f"{what}: {why}"

    def note(self, what: str) -> None:
        """Something to know that is no problem."""
        log.warning("%s %s", self._who, what)

    def works(self, what: str) -> None:
        over = [self._failing.pop(each) for each in {what, READ, DELETE} if each in self._failing]
        if over and not self._failing:
            log.info("%s works again", self._who)

    def dropped(self, name: str, why: str) -> None:
        log.warning("%s: dropped %s: %s", self._who, name, why)
