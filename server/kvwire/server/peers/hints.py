"""Where chunks were last thought to be, for when no coordinator says so in time. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.server.peers.members import Place

MAX_HINTS: Final = 65536


class Hints:
    """The least recently used go first."""

    def __init__(self, most: int = MAX_HINTS) -> None:
        self._most = most
        self._places: OrderedDict[bytes, tuple[Place, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def note(self, key: bytes, places: tuple[Place, ...]) -> None:
        """What is known of a key now; without places: nothing."""
        self._places.pop(key, None)
        if places:
            self._places[key] = places
            if len(self._places) > self._most:
                self._places.popitem(last=False)

    def of(self, keys: Sequence[bytes]) -> list[tuple[Place, ...]]:
        found = []
        for key in keys:
            places = self._places.get(key, ())
            if places:
                self._places.move_to_end(key)
            found.append(places)
        return found

    def drop(self, key: bytes, place: Place) -> None:
        """It was not there."""
        places = self._places.get(key)
        if places is not None and place in places:
            self.note(key, tuple(each for each in places if each != place))
