"""Where lower tiers keep their values: folders, object stores, Redis and Valkey."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvwire.errors import ConfigError

if TYPE_CHECKING:
    from .base import Backend, Place

_REDIS: Final = frozenset({"db", "tls", "ca", "user", "auth_env"})
OPTIONS: Final = {
    "file": frozenset[str](),
    "memory": frozenset[str](),
    "s3": frozenset[str](),
    "gs": frozenset[str](),
    "az": frozenset[str](),
    "redis": _REDIS,
    "valkey": _REDIS,
}
"""What `Place.options` may have, for every scheme."""

SCHEMES: Final = tuple(OPTIONS)


def make_backend(place: Place) -> Backend:
    """The backend of this place, not yet opened. Raises ConfigError and MissingExtra."""
    if place.scheme not in OPTIONS:
        raise ConfigError(f"--l2: there is no storage for {place.scheme}:// URLs, only {', '.join(OPTIONS)}")
    if unknown := sorted(set(place.options) - OPTIONS[place.scheme]):
        raise ConfigError(f"--l2: {place.scheme}:// URLs have no {unknown[0]}=")
    if place.scheme == "file":
        from .folder import FolderBackend

        return FolderBackend(place)
    if place.scheme in {"redis", "valkey"}:
        from .redis import RedisBackend

        return RedisBackend(place)
    from .objects import ObjectBackend

    return ObjectBackend(place)
