"""The real cache server on an event loop in a thread of the test's process: a test can look inside."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from typing import TYPE_CHECKING

import grpc

from kvwire.client.bearer import token_interceptors
from kvwire.server.app import CacheServer
from kvwire.server.config import ServerConfig
from support.server_process import open_channel

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


class LocalServer:
    """`run(f, *args)` calls `f` on the server's loop, and awaits it if it is a coroutine."""

    def __init__(self, folder: Path, **settings) -> None:
        self.address = f"unix:{folder / 'local.sock'}"
        defaults = {
            "listen": (self.address,),
            "l1_size": 4 * MIB,
            "sweep_interval": 0.05,
            "drain": 1.0,
            "chunk_size": 4,
        }
        self.config = ServerConfig(**{**defaults, **settings})
        self._channels: list[grpc.Channel] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="local-server", daemon=True)
        self._failure: BaseException | None = None

    def __enter__(self):
        self._thread.start()
        self._ready.wait(30)
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def __exit__(self, *_):
        for channel in self._channels:
            channel.close()
        self.begin_stop()
        self._thread.join(30)
        if self._failure is not None:
            raise self._failure

    def begin_stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has stopped before
            self._loop.call_soon_threadsafe(self._told.set)

    @property
    def core(self):
        return self.server.core

    @property
    def engine(self):
        return self.server.core.engine

    def channel(self, *, secret: str = "") -> grpc.Channel:
        """`secret`: the token that the server asks for."""
        channel = open_channel(self.address)
        if secret:
            channel = grpc.intercept_channel(channel, *token_interceptors(secret))
        self._channels.append(channel)
        return channel

    def run(self, function, *args):
        async def call():
            result = function(*args)
            return await result if inspect.isawaitable(result) else result

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(30)

    def status(self):
        return self.run(self.engine.status)

    def check(self) -> None:
        self.run(self.engine.check_integrity)

    def sweep(self) -> None:
        """Sweep now, and let what it cancels end."""
        self.run(self._sweep)

    async def _sweep(self) -> None:
        self.core.sweep()
        cancelling = list(self.core._cancelling)
        if cancelling:
            await asyncio.wait(cancelling)
        self.core.sweep()

    def _make(self):
        return CacheServer(self.config)

    def _serve(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001 - it is raised where the test can see it
            self._failure = error
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._told = asyncio.Event()
        self.server = self._make()
        await self.server.start()
        self._ready.set()
        await self._told.wait()
        await self.server.stop()
        left = {task for task in asyncio.all_tasks() - {asyncio.current_task()} if not task.done()}
        if left:
            await asyncio.wait(left, timeout=1.0)
        left = {task for task in left if not task.done()}
        assert not left, f"tasks left behind: {left}"


@contextlib.contextmanager
def local_server(folder: Path, **settings):
    with LocalServer(folder, **settings) as server:
        yield server
