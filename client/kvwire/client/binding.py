"""Registers a client that moves bytes: offers data paths, proves the one the server picks, falls back."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvwire.client import forks, paths
from kvwire.client.pipeline import Lane
from kvwire.client.types import Registration
from kvwire.errors import DataPathUnavailable, KvwireError, LayoutUnsupported, Unavailable
from kvwire.transfer.base import FAULTS, slot_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvwire.client.client import Client
    from kvwire.client.layout import KvLayout
    from kvwire.client.memory import KvMemory
    from kvwire.client.types import Offer, Path, Registered, Role
    from kvwire.keys import Namespace
    from kvwire.transfer.base import DataPath, Drain, Fill, SlotResult, Ticket

logger = logging.getLogger(__name__)

CLIENT_ID_BYTES: Final = 16
_DRAIN_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """What a client registers as. `layout` is made for the negotiated chunk size, which windows depend on."""

    engine_id: str
    role: Role
    namespace: Namespace
    layout: Callable[[int], KvLayout]
    alignment: int
    kv_rank: int = 0
    client_name: str = ""
    data_paths: str = "auto"


class SharedPath:
    """A data path for several threads: each transfer has an end of it to itself."""

    def __init__(
        self, name: str, make: Callable[[], DataPath], on_dead: Callable[[KvwireError], None]
    ) -> None:
        self.name = name
        self._make = make
        self._on_dead = on_dead
        self._lock = threading.Lock()
        self._ends: list[DataPath] = []
        self._free: list[DataPath] = []
        self._with_checksum = name in {"ucx-remote", "inline"}

    def write(self, ticket: Ticket, fill: Fill, deadline: float) -> list[SlotResult]:
        with self._end() as end:
            return end.write(ticket, fill, deadline, with_checksum=self._with_checksum)

    def read(self, ticket: Ticket, drain: Drain, deadline: float) -> list[SlotResult]:
        with self._end() as end:
            return end.read(ticket, drain, deadline)

    def close(self) -> None:
        """When no transfer is under way any more."""
        with self._lock:
            ends, self._ends, self._free = self._ends, [], []
        for end in ends:
            end.close()

    @contextmanager
    def _end(self) -> Iterator[DataPath]:
        try:
            end = self._take()
            yield end
        except FAULTS as error:
            failure = slot_error(error, self.name, "The data path")
            self._on_dead(failure)
            raise failure from error
        with self._lock:
            self._free.append(end)

    def _take(self) -> DataPath:
        with self._lock:
            if self._free:
                return self._free.pop()
        end = self._make()
        with self._lock:
            if not any(each is end for each in self._ends):
                self._ends.append(end)
        return end


@dataclass(slots=True)
class _Binding:
    lane: Lane
    path: SharedPath
    release: Callable[[], None]
    users: int = 0
    retired: bool = False

    def close(self) -> None:
        self.path.close()
        self.release()


class PathRegistrar:
    """One client's registration and data path, made anew after each outage.

    A transfer that runs meanwhile keeps the old path until it is done; its lease is lost by then.
    """

    def __init__(self, spec: CacheSpec, on_dead: Callable[[KvwireError], None]) -> None:
        self._spec = spec
        self._stages = paths.stages(spec.data_paths)
        self._on_dead = on_dead
        self._memory: KvMemory | None = None
        self._binding: _Binding | None = None
        self._told: set[Path] = set()
        self._forget()
        forks.watch(self)

    def after_fork(self) -> None:
        forks.keep(self._binding)
        self._forget()

    def _forget(self) -> None:
        self._changed = threading.Condition()
        self._client_id = os.urandom(CLIENT_ID_BYTES)
        self._binding = None

    @property
    def data_path(self) -> str:
        binding = self._binding
        return binding.path.name if binding else ""

    def set_memory(self, memory: KvMemory) -> None:
        self._memory = memory

    def register(self, client: Client, chunk_size: int) -> int:
        """0 while there is no memory to move."""
        memory = self._memory
        if memory is None:
            return 0
        layout = self._spec.layout(chunk_size)
        layout.validate(chunk_size)
        _check_memory(layout, memory)
        registered, opened = self._agree(client, layout, chunk_size)
        path = SharedPath(opened.name, opened.make, self._on_dead)
        lane = Lane(client, registered.registration_id, layout, path, memory.groups)
        self._swap(_Binding(lane, path, opened.release))
        return registered.registration_id

    def closed(self) -> None:
        """Let transfers end, for a while, and give the path back."""
        with self._changed:
            binding, self._binding = self._binding, None
            if binding is None:
                return
            binding.retired = True
            deadline = time.monotonic() + _DRAIN_S
            while binding.users and time.monotonic() < deadline:
                self._changed.wait(deadline - time.monotonic())
            idle = not binding.users
        if idle:
            binding.close()

    @contextmanager
    def use(self) -> Iterator[Lane]:
        """The lane, kept open meanwhile. Raises Unavailable when there is none."""
        with self._changed:
            binding = self._binding
            if binding is None:
                raise Unavailable("No KV caches are registered.")
            binding.users += 1
        try:
            yield binding.lane
        finally:
            with self._changed:
                binding.users -= 1
                last = binding.retired and not binding.users
                self._changed.notify_all()
            if last:
                binding.close()

    def _agree(
        self, client: Client, layout: KvLayout, chunk_size: int
    ) -> tuple[Registered, paths.OpenedPath]:
        """Register, with fewer and fewer offers until one is proven."""
        causes: dict[str, str] = {}
        refused = 0
        for stage in self._stages:
            wanted = list(stage)
            while wanted:
                offers = paths.offers(wanted, causes)
                if not offers:
                    break
                try:
                    registered = client.register(self._registration(layout, chunk_size, offers))
                except DataPathUnavailable as error:
                    causes.update(error.metadata)
                    break
                try:
                    return registered, paths.open_path(client, registered)
                except FAULTS as error:
                    refused = registered.registration_id
                    self._note_failure(registered, causes, str(error))
                    wanted.remove(registered.path)
        if refused:
            client.unregister_quietly(refused)
        raise DataPathUnavailable(
            "No data path works between this client and the server: "
            + ("; ".join(f"{name}: {cause}" for name, cause in causes.items()) or "none was offered")
            + ".",
            **causes,
        )

    def _registration(self, layout: KvLayout, chunk_size: int, offers: tuple[Offer, ...]) -> Registration:
        spec = self._spec
        return Registration(
            client_id=self._client_id,
            engine_id=spec.engine_id,
            role=spec.role,
            namespace=spec.namespace,
            layout=layout,
            chunk_size=chunk_size,
            kv_rank=spec.kv_rank,
            client_name=spec.client_name,
            offers=offers,
        )

    def _note_failure(self, registered: Registered, causes: dict[str, str], cause: str) -> None:
        name = registered.path.label
        causes[name] = cause.rstrip(".")
        if registered.path not in self._told:
            self._told.add(registered.path)
            logger.warning("kvwire: data path %s does not work here: %s", name, cause)

    def _swap(self, binding: _Binding) -> None:
        with self._changed:
            before, self._binding = self._binding, binding
            idle = before is not None and not before.users
            if before is not None:
                before.retired = True
        if before is not None and idle:
            before.close()


def _check_memory(layout: KvLayout, memory: KvMemory) -> None:
    told = [group.block_bytes for group in layout.groups]
    found = [pages.block_bytes for pages in memory.groups]
    if told != found:
        raise LayoutUnsupported(
            f"The blocks of the KV groups have {found} bytes, but the layout says {told}.",
            problem="block bytes",
        )
