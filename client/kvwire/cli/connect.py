"""How the commands reach a server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvwire.cli.settings import setting
from kvwire.errors import ConfigError

if TYPE_CHECKING:
    from kvwire.client import Client

DEFAULT_ADDRESS = "127.0.0.1:7470"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Section `client` of the settings file."""

    address: str = setting("The server: unix:PATH or HOST:PORT.", DEFAULT_ADDRESS)
    timeout: float = setting("Deadline of each call. 0: a few seconds, by the kind of call.", 0.0, "seconds")
    tls: bool = setting("Speak TLS, trusting the system's certificate authorities.", False)
    tls_ca: str = setting("PEM file of the authority that signed the server's certificate; turns TLS on.", "")
    client_cert: str = setting("PEM file with a client certificate, for mutual TLS.", "")
    client_key: str = setting("PEM file with its key.", "")
    server_name: str = setting("The name in the server's certificate, where it is not the address.", "")
    token_file: str = setting("File with the bearer token that the server asks for.", "")

    def __post_init__(self) -> None:
        if bool(self.client_cert) != bool(self.client_key):
            raise ConfigError("--client-cert and --client-key belong together.", setting="client_cert")

    @property
    def deadline(self) -> float | None:
        return self.timeout or None


def open_client(settings: ClientSettings, name: str) -> Client:
    from kvwire.client import Client, TlsConfig

    tls = None
    if settings.tls or settings.tls_ca or settings.client_cert:
        tls = TlsConfig(settings.tls_ca, settings.client_cert, settings.client_key, settings.server_name)
    return Client(settings.address, tls=tls, token=_token(settings.token_file), client_name=f"kvwire {name}")


def _token(path: str) -> str:
    if not path:
        return ""
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(f"--token-file {path}: {error.strerror}.", setting="token_file") from error
