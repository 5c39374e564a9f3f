from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from kvwire.keys import root, salt_digest
from kvwire.server.store import Space

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.keys import Namespace
    from kvwire.server.registry import Registrations


@dataclass(frozen=True, slots=True)
class Identity:
    """What a namespace is known by: its root, the root without adapter and salt, a digest of the salt."""

    root: bytes
    base_root: bytes
    tenant: str


def base_of(namespace: Namespace) -> Namespace:
    """The namespace that layouts are registered for."""
    return replace(namespace, adapter="", adapter_revision="", salt="")


@lru_cache(maxsize=1024)
def identify(namespace: Namespace, chunk_size: int) -> Identity:
    """Raises InvalidArgument unless the namespace is legal."""
    own = root(namespace, chunk_size)
    tenant = salt_digest(namespace.salt) if namespace.salt else ""
    return Identity(own, root(base_of(namespace), chunk_size), tenant)


class Spaces:
    """The namespaces in use, each with the layout that is registered for its base."""

    def __init__(self, registrations: Registrations) -> None:
        self._registrations = registrations
        self._by_root: dict[bytes, Space] = {}

    def __iter__(self) -> Iterator[Space]:
        return iter(self._by_root.values())

    def open(self, namespace: Namespace, chunk_size: int) -> Space | None:
        """The space of a namespace; None while nobody has registered a layout for its base."""
        identity = identify(namespace, chunk_size)
        shards = self._registrations.layout_of(identity.base_root)
        if shards is None:
            return None
        space = self._by_root.get(identity.root)
        if space is None or not space.shards.same_as(shards):
            # Chunks of a former layout stay with its space, and make way when their keys are stored again.
            space = Space(identity.root, identity.base_root, namespace.model, identity.tenant, shards)
            self._by_root[identity.root] = space
        return space

    def by_root(self, root: bytes) -> Space | None:
        """A space that is open or has chunks."""
        return self._by_root.get(root)

    def peek(self, namespace: Namespace, chunk_size: int) -> Space | None:
        """The space as it is or was last, also after everyone who registered its layout has gone."""
        return self.open(namespace, chunk_size) or self._by_root.get(identify(namespace, chunk_size).root)

    def sweep(self, in_use: set[int]) -> None:
        """Forget spaces that hold no chunk, except those whose id() is given."""
        unused = [space for space in self if not space.chunks and id(space) not in in_use]
        for space in unused:
            del self._by_root[space.root]
