"""gRPC to other servers, over connections that are kept as long as the run that they lead to."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from kvwire.client.channel import ChannelConfig, TlsConfig, parse_target
from kvwire.client.status import from_rpc_error
from kvwire.errors import ConfigError, DeadlineExceeded, Unavailable
from kvwire.serving.listen import read_file
from kvwire.telemetry import tracing
from kvwire.v1 import peer_service_pb2_grpc

if TYPE_CHECKING:
    from kvwire.server.config import ServerConfig
    from kvwire.server.peers.members import PeerInfo, Place


class Calls:
    """Raises ConfigError for files that cannot be read."""

    def __init__(self, config: ServerConfig) -> None:
        self._seconds = config.peer_timeout
        self._tls: TlsConfig | None = None
        if config.peer_ca or config.peer_cert:
            self._tls = TlsConfig(config.peer_ca, config.peer_cert, config.peer_key)
            self._tls.credentials()
        self._token = ""
        if config.peer_token_file:
            self._token = read_file(config.peer_token_file, "peer_token_file").decode().strip()
        self._channels: dict[tuple[Place, str], grpc.aio.Channel] = {}
        self._good: dict[Place, str] = {}

    def address(self, peer: PeerInfo) -> str:
        """Where it is asked first."""
        return self._good.get(peer.place) or next(iter(peer.addresses), "")

    async def call(self, peer: PeerInfo, method: str, request: Any, seconds: float) -> Any:
        """At the first of its addresses that answers. Raises KvwireError."""
        seconds = min(seconds, self._seconds)
        end = asyncio.get_running_loop().time() + seconds
        first = self.address(peer)
        error: Exception = Unavailable(f"{peer.server_id} advertises no address.")
        for address in sorted(peer.addresses, key=lambda each: each != first):
            rest = end - asyncio.get_running_loop().time()
            if rest <= 0:
                break
            try:
                stub = peer_service_pb2_grpc.PeerServiceStub(self._channel(peer.place, address))
                reply = await getattr(stub, method)(request, timeout=rest)
            except ConfigError as unfit:
                error = unfit
                continue
            except grpc.RpcError as failed:
                error = from_rpc_error(failed, address=address, method=method, seconds=seconds)
                if not isinstance(error, Unavailable):
                    raise error from failed
                continue
            self._good[peer.place] = address
            return reply
        if isinstance(error, Unavailable | ConfigError):
            raise error
        raise DeadlineExceeded(f"{peer.server_id} does not answer {method} within {seconds:g} s.")

    async def forget(self, known: set[Place]) -> None:
        """Close connections to runs that are over."""
        self._good = {place: address for place, address in self._good.items() if place in known}
        for key in [key for key in self._channels if key[0] not in known]:
            await self._channels.pop(key).close()

    async def close(self) -> None:
        await self.forget(set())

    def _channel(self, place: Place, address: str) -> grpc.aio.Channel:
        channel = self._channels.get((place, address))
        if channel is None:
            target = parse_target(address)
            tls = None if target.text.startswith("unix:") else self._tls
            active = tracing.active()
            interceptors = active.aio_client_interceptors(target.text) if active is not None else []
            channel = ChannelConfig(target, tls, self._token).open_aio(interceptors)
            self._channels[place, address] = channel
        return channel
