"""Channels that are made when they are first used: one per process, and per event loop for asyncio."""

from __future__ import annotations

import asyncio
import threading
import weakref
from typing import TYPE_CHECKING, Any

from kvwire import telemetry
from kvwire.client import forks
from kvwire.errors import Unavailable
from kvwire.v1 import admin_service_pb2_grpc, cache_service_pb2_grpc

if TYPE_CHECKING:
    import grpc

    from kvwire.client.channel import ChannelConfig


def make_stubs(channel: Any) -> dict[str, Any]:
    return {
        "CacheService": cache_service_pb2_grpc.CacheServiceStub(channel),
        "AdminService": admin_service_pb2_grpc.AdminServiceStub(channel),
    }


def closed_error(config: ChannelConfig) -> Unavailable:
    return Unavailable(
        f"This client of {config.target} is closed: make a new one.", address=str(config.target)
    )


class Connection:
    """A synchronous channel and its stubs."""

    def __init__(self, config: ChannelConfig) -> None:
        self.config = config
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._stubs: dict[str, Any] = {}
        self._closed = False
        forks.watch(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        if self._channel is not None:
            forks.keep((self._channel, self._stubs))
        self._channel = None
        self._stubs = {}

    def stub(self, service: str) -> Any:
        stub = self._stubs.get(service)
        return stub if stub is not None else self._open()[service]

    def channel(self) -> grpc.Channel:
        """For other services on the same address, with the same credentials."""
        self._open()
        channel = self._channel
        if channel is None:
            raise closed_error(self.config)
        return channel

    def reset(self) -> None:
        """End calls in flight and the connection. The next call connects anew."""
        with self._lock:
            channel, self._channel = self._channel, None
            self._stubs = {}
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """As `reset`, but later calls fail."""
        self._closed = True
        self.reset()

    def _open(self) -> dict[str, Any]:
        with self._lock:
            if self._closed:
                raise closed_error(self.config)
            if self._channel is None:
                interceptors = telemetry.client_interceptors(str(self.config.target))
                self._channel = self.config.open(interceptors)
                self._stubs = make_stubs(self._channel)
            return self._stubs


class AioConnection:
    """Asynchronous channels and their stubs, one pair per running loop."""

    def __init__(self, config: ChannelConfig) -> None:
        self.config = config
        self._loops: weakref.WeakKeyDictionary[Any, tuple[grpc.aio.Channel, dict[str, Any]]] = (
            weakref.WeakKeyDictionary()
        )
        self._closed = False
        forks.watch(self)

    def after_fork(self) -> None:
        forks.keep(self._loops)
        self._loops = weakref.WeakKeyDictionary()

    def stub(self, service: str) -> Any:
        return self._open()[1][service]

    def channel(self) -> grpc.aio.Channel:
        return self._open()[0]

    async def close(self) -> None:
        """Close the running loop's channel. Channels of other loops cannot be closed from here."""
        self._closed = True
        opened = self._loops.pop(asyncio.get_running_loop(), None)
        if opened is not None:
            await opened[0].close()

    def _open(self) -> tuple[grpc.aio.Channel, dict[str, Any]]:
        loop = asyncio.get_running_loop()
        opened = self._loops.get(loop)
        if opened is not None:
            return opened
        if self._closed:
            raise closed_error(self.config)
        channel = self.config.open_aio(telemetry.aio_client_interceptors(str(self.config.target)))
        self._loops[loop] = opened = (channel, make_stubs(channel))
        return opened
