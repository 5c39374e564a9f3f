"""Where lower tiers keep their values: folders, object stores, Redis and Valkey."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvwire.errors import ConfigError

if TYPE_CHECKING:
    from .base import Backend, Place

SCHEMES: Final = ("file", "memory", "s3", "gs", "az", "redis", "valkey")


def make_backend(place: Place) -> Backend:
    """The backend of this place, not yet opened. Raises ConfigError and MissingExtra."""
    if place.scheme == "file":
        from .folder import FolderBackend

        return FolderBackend(place)
    raise ConfigError(f"--l2: there is no storage for {place.scheme}:// URLs, only {', '.join(SCHEMES)}")
