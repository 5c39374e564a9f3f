"""Registers a client that moves bytes: offers data paths, proves the one the server picks, falls back."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvwire.client import forks, paths
from kvwire.client.pipeline import Lane
from kvwire.client.types import Path, Registration
from kvwire.errors import DataPathUnavailable, KvwireError, LayoutUnsupported, Unavailable
from kvwire.transfer.arena_path import ArenaPath
from kvwire.transfer.base import FAULTS, slot_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from kvwire.client.client import Client
    from kvwire.client.layout import KvLayout
    from kvwire.client.memory import KvMemory
    from kvwire.client.types import Offer, Role
    from kvwire.keys import Namespace
    from kvwire.transfer.base import DataPath, Drain, Fill, Mark, SlotResult, Ticket

logger = logging.getLogger(__name__)

CLIENT_ID_BYTES: Final = 16
_DRAIN_S: Final = 5.0
_FAREWELL_S: Final = 1.0


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
    ucx_devices: tuple[str, ...] = ()


class LivePath:
    """A proven data path. An exception out of it is told, so that another one is agreed on."""

    def __init__(self, end: DataPath, on_dead: Callable[[KvwireError], None]) -> None:
        self.name = end.name
        self.turn: AbstractContextManager[Any] = (
            threading.Lock() if end.name.startswith("ucx") else nullcontext()
        )
        self.lends = isinstance(end, ArenaPath)
        self._end = end
        self._on_dead = on_dead
        # Elsewhere the server makes the checksum, in a pause: hashing takes time from the copies.
        self._with_checksum = end.name == "inline"

    def write(self, ticket: Ticket, fill: Fill, deadline: float) -> list[SlotResult]:
        with self._watched():
            return self._end.write(ticket, fill, deadline, with_checksum=self._with_checksum)

    def read(self, ticket: Ticket, drain: Drain, deadline: float) -> list[SlotResult]:
        with self._watched():
            return self._end.read(ticket, drain, deadline)

    def mark(self) -> Mark:
        with self._watched():
            return self._end.mark()

    def publish(self, ticket: Ticket, mark: Mark) -> bool:
        with self._watched():
            return self._end.publish(ticket, mark)

    def proves(self, ticket: Ticket, mark: Mark) -> bool:
        with self._watched():
            return self._end.proves(ticket, mark)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except FAULTS as error:
            failure = slot_error(error, self.name, "The data path")
            self._on_dead(failure)
            raise failure from error


@dataclass(slots=True)
class _Binding:
    lane: Lane
    candidate: paths.Candidate
    users: int = 0
    retired: bool = False


class PathRegistrar:
    """One client's registration and data path, made anew after each outage.

    A transfer that runs meanwhile keeps the old path until it is done; its lease is lost by then.
    """

    def __init__(self, spec: CacheSpec, on_dead: Callable[[KvwireError], None]) -> None:
        self._spec = spec
        self._choice = paths.choice(spec.data_paths)
        self._on_dead = on_dead
        self._memory: KvMemory | None = None
        self._binding: _Binding | None = None
        self._told: set[Path] = set()
        self._path: Path | None = None
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
        return binding.lane.path.name if binding else ""

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
        if not self._path and layout.coarseness():
            logger.warning("kvwire: %s", layout.coarseness())
        registration_id, end, candidate = self._agree(client, layout, chunk_size)
        lane = Lane(client, registration_id, layout, LivePath(end, self._on_dead), memory.groups)
        self._swap(_Binding(lane, candidate))
        return registration_id

    def lost(self) -> None:
        binding = self._binding
        if binding is not None:
            binding.candidate.give_up()

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
            binding.candidate.close()

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
                binding.candidate.close()

    def _agree(
        self, client: Client, layout: KvLayout, chunk_size: int
    ) -> tuple[int, DataPath, paths.Candidate]:
        """Register with one offer after the other, until a path is proven."""
        causes: dict[str, str] = {}
        unproven = 0
        device = self._memory.device if self._memory is not None else "cpu"
        for path in self._choice:
            try:
                candidate = paths.Candidate(path, self._spec.ucx_devices, device)
            except FAULTS as error:
                causes[path.label] = _cause(error)
                continue
            try:
                registered = client.register(self._registration(layout, chunk_size, candidate.offer()))
            except DataPathUnavailable as error:
                candidate.close()
                causes[path.label] = error.metadata.get(path.label) or _cause(error)
                continue
            except BaseException:
                candidate.close()
                raise
            try:
                end = candidate.open(client, registered)
            except FAULTS as error:
                unproven = registered.registration_id
                candidate.close()
                causes[path.label] = _cause(error)
                self._note_failure(path, causes[path.label])
                continue
            self._note_choice(client, path, causes)
            return registered.registration_id, end, candidate
        if unproven:
            # Waited for: the client may be closed at once, and what is on its way with it.
            with suppress(KvwireError):
                client.unregister(unproven, timeout=_FAREWELL_S)
        raise DataPathUnavailable(
            "No data path works between this client and the server: "
            + "; ".join(f"{name}: {cause}" for name, cause in causes.items())
            + ".",
            **causes,
        )

    def _registration(self, layout: KvLayout, chunk_size: int, offer: Offer) -> Registration:
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
            offers=(offer,),
        )

    def _note_choice(self, client: Client, path: Path, causes: dict[str, str]) -> None:
        if path is self._path:
            return
        self._path = path
        worse = path is Path.INLINE and bool(causes)
        why = "".join(f"; no {name}: {cause}" for name, cause in causes.items())
        logger.log(
            logging.WARNING if worse else logging.INFO,
            "kvwire: bytes move over %s with %s%s",
            f"the slow path {path.label}" if worse else path.label,
            client.target,
            why,
        )

    def _note_failure(self, path: Path, cause: str) -> None:
        if path not in self._told:
            self._told.add(path)
            logger.warning("kvwire: data path %s does not work here: %s", path.label, cause)

    def _swap(self, binding: _Binding) -> None:
        with self._changed:
            before, self._binding = self._binding, binding
            idle = before is not None and not before.users
            if before is not None:
                before.retired = True
        if before is not None and idle:
            before.candidate.close()


def _cause(error: BaseException) -> str:
    """Why a path cannot be used, in the shortest words there are."""
    told = error.metadata if isinstance(error, KvwireError) else {}
    return (told.get("cause") or str(error) or type(error).__name__).rstrip(".")


def _check_memory(layout: KvLayout, memory: KvMemory) -> None:
    told = [group.block_bytes for group in layout.groups]
    found = [pages.block_bytes for pages in memory.groups]
    if told != found:
        raise LayoutUnsupported(
            f"The blocks of the KV groups have {found} bytes, but the layout says {told}.",
            problem="block bytes",
        )
