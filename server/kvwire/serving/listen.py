"""Where the server may be reached: addresses, socket files, TLS, and what is refused."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import grpc

from kvwire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Exposure(Protocol):
    """The settings of a program that serves: what it shows of itself, and to whom."""

    @property
    def tls_cert(self) -> str: ...
    @property
    def tls_key(self) -> str: ...
    @property
    def tls_client_ca(self) -> str: ...
    @property
    def token_file(self) -> str: ...
    @property
    def insecure_bind(self) -> bool: ...


KEEPALIVE_MS: Final = 5_000
ANSWER_MS: Final = 10_000
"""For a client's gRPC to answer a ping; one that hangs longer has lost its connection."""
MAX_SOCKET_PATH: Final = 107
"""Bytes of a socket file's path that Linux takes."""


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: str

    @property
    def target(self) -> str:
        return f"unix:{self.path}"

    is_local = True


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int

    @property
    def target(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_local(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """`unix:PATH` or `HOST:PORT` (IPv6 in brackets, port 0 for a free one). Raises ConfigError."""
    if text.startswith("unix:"):
        path = str(Path(text.removeprefix("unix:").removeprefix("//")).absolute())
        if text == "unix:" or len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise ConfigError(
                f"--listen {text}: a socket path has 1 to {MAX_SOCKET_PATH} bytes.", setting="listen"
            )
        return UnixAddress(path)
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--listen {text}: write unix:PATH or HOST:PORT.", setting="listen")
    return TcpAddress(host.strip("[]"), int(port))


def check_exposure(address: Address, config: Exposure) -> None:
    """Refuse an address that other hosts reach without credentials. Raises ConfigError."""
    protected = bool(config.tls_cert) and bool(config.tls_client_ca or config.token_file)
    if address.is_local or protected or config.insecure_bind:
        return
    raise ConfigError(
        f"--listen {address.target} is reachable from other hosts: give --tls-cert and --tls-key with "
        "--tls-client-ca or --token-file, or say --insecure-bind if the network is trusted.",
        setting="listen",
    )


def bind(server: grpc.aio.Server, address: Address, credentials: grpc.ServerCredentials | None) -> Address:
    """Bind and return the address with its real port. An address in use is a ConfigError, never shared."""
    if isinstance(address, UnixAddress):
        clear_dead_socket(address.path)
        with _umask(0o177):
            _add_port(server, address, None)
        Path(address.path).chmod(0o600)
        return address
    check_port_is_free(address)
    port = _add_port(server, address, credentials)
    return TcpAddress(address.host, port)


def check_port_is_free(address: TcpAddress) -> None:
    """A name may stand for several addresses, and gRPC is content when one of them can be had."""
    if not address.port:
        return
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError:
        return  # gRPC says what is wrong with it
    for family, kind, protocol, _, place in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(place)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise _unavailable(address) from error


def clear_dead_socket(path: str) -> None:
    """Remove the socket file of a server that is gone. A live one, or any other file, is a ConfigError."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        parent = Path(path).parent
        if not parent.is_dir():
            raise ConfigError(
                f"--listen unix:{path}: the folder {parent} does not exist.", setting="listen"
            ) from None
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"--listen unix:{path}: there is a file of another kind.", setting="listen")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            Path(path).unlink(missing_ok=True)
            return
        except OSError as error:
            raise ConfigError(f"--listen unix:{path}: {error.strerror}.", setting="listen") from error
    raise ConfigError(f"--listen unix:{path}: another server is running there.", setting="listen")


def remove_sockets(targets: tuple[str, ...]) -> None:
    for target in targets:
        if target.startswith("unix:"):
            Path(target.removeprefix("unix:")).unlink(missing_ok=True)


def server_credentials(config: Exposure) -> grpc.ServerCredentials | None:
    """TLS or mTLS credentials, or None without --tls-cert. Raises ConfigError for unreadable files."""
    if not config.tls_cert:
        return None
    _check_pair(config)
    ca = read_file(config.tls_client_ca, "tls_client_ca") if config.tls_client_ca else None
    return grpc.ssl_server_credentials(
        [(read_file(config.tls_key, "tls_key"), read_file(config.tls_cert, "tls_cert"))],
        root_certificates=ca,
        require_client_auth=ca is not None,
    )


def bearer_token(config: Exposure) -> bytes:
    """What clients must send, empty without --token-file. Raises ConfigError."""
    if not config.token_file:
        return b""
    token = read_file(config.token_file, "token_file").strip()
    if not token or not token.isascii() or any(byte < 33 for byte in token):
        raise ConfigError(
            f"--token-file {config.token_file}: write one token of ASCII characters without spaces.",
            setting="token_file",
        )
    return token


def read_file(path: str, name: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag} {path}: {error.strerror}.", setting=name) from error


def _check_pair(config: Exposure) -> None:
    """gRPC itself would take anything here, and later say that it cannot bind."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
        if config.tls_client_ca:
            context.load_verify_locations(config.tls_client_ca)
    except (OSError, ValueError) as error:
        files = ", ".join(filter(None, (config.tls_cert, config.tls_key, config.tls_client_ca)))
        raise ConfigError(
            f"--tls-cert, --tls-key, --tls-client-ca: {files} cannot be used together: {error}.",
            setting="tls_cert",
        ) from error


def _no_password() -> str:
    raise ValueError("the key has a password, which nobody can type here")


def _add_port(server: grpc.aio.Server, address: Address, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            return server.add_insecure_port(address.target)
        return server.add_secure_port(address.target, credentials)
    except RuntimeError as error:
        raise _unavailable(address) from error


def _unavailable(address: Address) -> ConfigError:
    return ConfigError(
        f"--listen {address.target}: the address is in use, not on this host, or not allowed.",
        setting="listen",
    )


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def grpc_options(max_message: int) -> list[tuple[str, Any]]:
    """Of every gRPC server of ours; `max_message` in bytes, for both directions."""
    return [
        ("grpc.max_receive_message_length", max_message),
        ("grpc.max_send_message_length", max_message),
        # A port in use is an error, never shared with another server.
        ("grpc.so_reuseport", 0),
        # A peer that vanished without closing is noticed, and its Attach stream ends.
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", ANSWER_MS),
        # gRPC measures bandwidth with pings of its own: one without an answer would hold keepalive up for a
        # minute.
        ("grpc.http2.ping_timeout_ms", ANSWER_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
