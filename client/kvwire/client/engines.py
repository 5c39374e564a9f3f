"""The UCX engines of this process: started when a data path first needs one, ended with its last user."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from kvwire.client import forks

if TYPE_CHECKING:
    from kvwire.transfer.ucx import UcxEngine
    from kvwire.transfer.ucx_options import Kind

Key = tuple["Kind", tuple[str, ...]]


class EngineUse:
    """One user's hold on an engine. `release` it once."""

    def __init__(self, owner: UcxEngines, key: Key, engine: UcxEngine) -> None:
        self.engine: Final = engine
        self._owner = owner
        self._key = key
        self._released = False

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._owner.release(self._key, self.engine)


class UcxEngines:
    """One engine for each kind of peer and set of devices."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: dict[Key, tuple[UcxEngine, int]] = {}
        forks.watch(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        forks.keep(self._engines)
        self._engines = {}

    def use(self, kind: Kind, devices: tuple[str, ...]) -> EngineUse:
        """Start the engine or share it. Raises MissingExtra, ConfigError or DataPathUnavailable."""
        from kvwire.transfer.ucx import UcxEngine
        from kvwire.transfer.ucx_options import UcxOptions

        key: Key = (kind, devices)
        with self._lock:
            engine, users = self._engines.get(key, (None, 0))
            if engine is None:
                engine = UcxEngine(UcxOptions(kind, "client", devices))
            self._engines[key] = (engine, users + 1)
            return EngineUse(self, key, engine)

    def release(self, key: Key, engine: UcxEngine) -> None:
        with self._lock:
            known, users = self._engines.get(key, (None, 0))
            if known is not engine:
                return
            if users > 1:
                self._engines[key] = (engine, users - 1)
                return
            del self._engines[key]
        engine.close()


engines: Final = UcxEngines()
