"""Where a server is, and the gRPC channel to it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc

from kvwire.client.bearer import aio_token_interceptors, token_interceptors
from kvwire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_MESSAGE_BYTES: Final = 16 << 20
"""In both directions, as the server's own default."""

_MAX_SOCKET_PATH = 107
_SCHEMES = ("grpc://", "grpcs://", "http://", "https://", "tcp://")
_KEEPALIVE_MS = 30_000


@dataclass(frozen=True, slots=True)
class Target:
    """A parsed address. `str()` is what people type, `grpc_target` what gRPC takes."""

    text: str
    grpc_target: str
    is_local: bool
    """Unix sockets and loopback: no proxy, no keepalive, no need of TLS."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Files in PEM. `ca` empty: the system's roots. `cert` and `key` for mutual TLS."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""
    """The name in the server's certificate, where it differs from the address."""

    def credentials(self) -> grpc.ChannelCredentials:
        if bool(self.cert) != bool(self.key):
            raise ConfigError("Mutual TLS needs both a certificate and its key.")
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.cert))


@dataclass(frozen=True, slots=True)
class ChannelConfig:
    """All that a channel is made from. It can be made anew in a forked process."""

    target: Target
    tls: TlsConfig | None = None
    token: str = field(default="", repr=False)

    def options(self) -> list[tuple[str, Any]]:
        options: list[tuple[str, Any]] = [
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            # A server that comes back is found within about a second (gRPC's own limit is two minutes).
            # The minimum is also what one attempt may take where packets are dropped silently.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 2_000),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            # Two clients of one process do not share a connection, so closing one never touches the other.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if self.target.is_local:
            options.append(("grpc.enable_http_proxy", 0))
        else:
            options.append(("grpc.keepalive_time_ms", _KEEPALIVE_MS))
            options.append(("grpc.keepalive_timeout_ms", 10_000))
        if self.tls is not None and self.tls.server_name:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options

    def open(self, interceptors: Sequence[Any] = ()) -> grpc.Channel:
        options = self.options()
        if self.tls is None:
            channel = grpc.insecure_channel(self.target.grpc_target, options)
        else:
            channel = grpc.secure_channel(self.target.grpc_target, self.tls.credentials(), options)
        every = [*interceptors, *token_interceptors(self.token)]
        return grpc.intercept_channel(channel, *every) if every else channel

    def open_aio(self, interceptors: Sequence[Any] = ()) -> grpc.aio.Channel:
        options = self.options()
        every = [*interceptors, *aio_token_interceptors(self.token)]
        if self.tls is None:
            return grpc.aio.insecure_channel(self.target.grpc_target, options, interceptors=every)
        credentials = self.tls.credentials()
        return grpc.aio.secure_channel(self.target.grpc_target, credentials, options, interceptors=every)


def parse_target(address: str) -> Target:
    """`unix:PATH` or `HOST:PORT` ([::1]:7470 for IPv6). A scheme such as tcp:// is dropped."""
    text = address.strip()
    if text.startswith("unix:"):
        return _unix_target(text)
    for scheme in _SCHEMES:
        text = text.removeprefix(scheme)
    host, separator, port = text.rstrip("/").rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not separator or not bare or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ConfigError(f"{address!r} is no address: write unix:PATH or HOST:PORT.", address=address)
    if ":" in bare and bare == host:
        raise ConfigError(f"{address!r} is ambiguous: write an IPv6 address as [::1]:7470.", address=address)
    return Target(f"{host}:{port}", f"dns:///{host}:{port}", _is_loopback(bare))


def _unix_target(text: str) -> Target:
    path = text.removeprefix("unix:")
    if path.startswith("//"):
        path = path.removeprefix("//")
    if not path:
        raise ConfigError(f"{text!r} names no socket file: write unix:PATH.", address=text)
    if len(path.encode()) > _MAX_SOCKET_PATH:
        raise ConfigError(
            f"The socket path {path!r} is longer than the {_MAX_SOCKET_PATH} bytes that the system allows.",
            address=text,
        )
    return Target(f"unix:{path}", f"unix:{path}", is_local=True)


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        raise ConfigError(f"The TLS file {path} cannot be read: {exc.strerror}.", path=path) from exc
