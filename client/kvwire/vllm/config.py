"""What `kv_connector_extra_config` may say, in one frozen dataclass."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvwire.client.channel import parse_target
from kvwire.errors import ConfigError
from kvwire.vllm.params import RequestParams

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")
PREFIX: Final = "kvwire."
ADDRESS_ENV: Final = "KVWIRE_ADDRESS"
DEFAULT_ADDRESS: Final = "127.0.0.1:7470"
_SIZE: Final = re.compile(r"\d+(\.\d+)?\s*([KMGTkmgt]i?[Bb]?|[Bb])?")
DATA_PATHS: Final = ("auto", "shm", "ucx", "inline")


def setting(text: str, default: T) -> T:
    found: T = field(default=default, metadata={"help": text})
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """Each field `name` is the key `kvwire.name`. Times are seconds."""

    address: str = setting(
        "The server: unix:PATH or HOST:PORT. Several (a list, or commas between them) share the ranks of the "
        f"engine. Default: {ADDRESS_ENV}, else {DEFAULT_ADDRESS}.",
        "",
    )
    model: str = setting("Name of the model in keys. Default: the engine's own --model.", "")
    data_path: str = setting(f"How bytes move, one of {', '.join(DATA_PATHS)}.", "auto")
    copy_threads: int = setting("Threads that copy blocks in each worker. 0: chosen by the data path.", 0)
    heartbeat_interval: float = setting("Seconds between two heartbeats.", 10.0)
    save_decode: bool = setting("Also store chunks that the model generated.", False)
    lazy: bool = setting(
        "Store only what the engine is about to drop from its own prefix cache. For models of full attention "
        "whose prefix caching is on; others store as without it.",
        False,
    )
    request_stats: bool = setting(
        "Put each request's statistics into its response, as if it had asked for them.", False
    )
    overlap: bool = setting(
        "Load layer by layer ahead of the forward pass that reads it, and store behind the one that writes "
        "it. For models with one KV group; others do as without it.",
        False,
    )
    overlap_wait: float = setting(
        "Longest time that a step waits for such loads; what is not there then is computed.", 5.0
    )
    early_lookups: int = setting(
        "Requests that are looked up while they wait; the others are when their turn comes. 0: none.", 64
    )
    reset_wait: float = setting("Longest wait for the server when the engine's cache is reset.", 2.0)
    store_wait: float = setting(
        "Longest wait for a store whose blocks the engine needs; then the store is given up.", 5.0
    )
    shutdown_wait: float = setting("Longest wait for stores in flight when the engine stops.", 5.0)
    autostart: bool = setting(
        "Start a server on this host where none answers at the address. It stays when the engine stops.",
        False,
    )
    autostart_l1_size: str = setting("Size of such a server's memory tier, for example 8GiB.", "1GiB")
    autostart_idle_exit: float = setting(
        "Seconds without a client after which such a server stops by itself. 0: never.", 3600.0
    )
    autostart_flags: str = setting("Further flags of `kvwire server`, as one would type them.", "")
    autostart_folder: str = setting(
        "Where lock and log of such a server are. Default: $XDG_RUNTIME_DIR/kvwire, else /tmp/kvwire-UID.", ""
    )
    otlp_endpoint: str = setting(
        "OTLP/gRPC endpoint for kvwire's own spans. Default: the engine's --otlp-traces-endpoint.", ""
    )
    token_file: str = setting("File whose content is sent as bearer token.", "")
    tls: bool = setting("Use TLS. Without tls_ca the system's roots are trusted.", False)
    tls_ca: str = setting("PEM file with the CA of the server's certificate; turns TLS on.", "")
    tls_cert: str = setting("PEM file with the client's certificate, for mutual TLS.", "")
    tls_key: str = setting("PEM file with the client's private key.", "")
    tls_server_name: str = setting("Name in the server's certificate, where it is not the address.", "")

    def __post_init__(self) -> None:
        _check(self.data_path in DATA_PATHS, "data_path", f"is one of {', '.join(DATA_PATHS)}")
        _check(0 <= self.copy_threads <= 64, "copy_threads", "is a number from 0 to 64")
        _check(0.05 <= self.heartbeat_interval <= 3600, "heartbeat_interval", "is 0.05 to 3600 seconds")
        _check(0 <= self.early_lookups <= 4096, "early_lookups", "is a number from 0 to 4096")
        _check(0.1 <= self.reset_wait <= 60, "reset_wait", "is 0.1 to 60 seconds")
        _check(0 < self.overlap_wait <= 600, "overlap_wait", "is up to 600 seconds")
        _check(0 <= self.store_wait <= 600, "store_wait", "is 0 to 600 seconds")
        _check(0 <= self.shutdown_wait <= 600, "shutdown_wait", "is 0 to 600 seconds")
        _check(bool(self.tls_cert) == bool(self.tls_key), "tls_key", "and kvwire.tls_cert belong together")
        _check(self.autostart_idle_exit >= 0, "autostart_idle_exit", "is 0 or a number of seconds")
        _check(bool(_SIZE.fullmatch(self.autostart_l1_size)), "autostart_l1_size", "is a size such as 8GiB")
        _check(
            not (self.autostart and self.uses_tls), "autostart", "starts a server without TLS: leave one out"
        )
        _check(
            not self.autostart or all(parse_target(each).is_local for each in self.addresses),
            "autostart",
            "starts servers on this host: kvwire.address must be unix:PATH or a loopback address",
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Each server's, as `parse_target` writes it. Raises ConfigError."""
        texts = [text.strip() for text in self.address.split(",")]
        return tuple(str(parse_target(text)) for text in texts if text)

    @property
    def uses_tls(self) -> bool:
        return self.tls or bool(self.tls_ca or self.tls_cert)

    @property
    def request_defaults(self) -> RequestParams:
        """What holds for a request that says nothing itself."""
        return RequestParams(save_decode=self.save_decode, stats=self.request_stats)

    def server_flags(self) -> list[str]:
        """Of a server that is started here."""
        idle = ["--idle-exit", f"{self.autostart_idle_exit:g}s"] if self.autostart_idle_exit else []
        token = ["--token-file", str(Path(self.token_file).absolute())] if self.token_file else []
        return ["--l1-size", self.autostart_l1_size, *idle, *token, *shlex.split(self.autostart_flags)]

    def token(self) -> str:
        """The bearer token, or an empty string. Raises ConfigError when the file cannot be read."""
        if not self.token_file:
            return ""
        try:
            return Path(self.token_file).read_text(encoding="utf-8").strip()
        except OSError as exc:
            raise ConfigError(
                f"{PREFIX}token_file: {self.token_file} cannot be read: {exc.strerror}.",
                setting=f"{PREFIX}token_file",
            ) from exc


def connector_config(extra: Mapping[str, Any]) -> ConnectorConfig:
    """The settings among an engine's extra keys. Raises ConfigError naming a key that is unknown or wrong.

    Keys without the prefix belong to somebody else and are left alone.
    """
    known = {each.name: each.default for each in fields(ConnectorConfig)}
    values: dict[str, Any] = {}
    for key, value in extra.items():
        if key.startswith(PREFIX):
            name = key.removeprefix(PREFIX)
            if name not in known:
                raise _unknown(key, known)
            values[name] = _typed(key, _joined(value) if name == "address" else value, type(known[name]))
    if not values.get("address"):
        values["address"] = os.environ.get(ADDRESS_ENV) or DEFAULT_ADDRESS
    return ConnectorConfig(**values)


def _joined(address: Any) -> Any:
    """A list of addresses as one text; anything else as it is."""
    if isinstance(address, list | tuple) and all(isinstance(each, str) for each in address):
        return ",".join(address)
    return address


def _typed(key: str, value: Any, wanted: type) -> Any:
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not wanted:
        raise ConfigError(
            f"{key} is {value!r}; it must be of type {wanted.__name__}.", setting=key, value=value
        )
    return value


def _unknown(key: str, known: Mapping[str, Any]) -> ConfigError:
    near = get_close_matches(key.removeprefix(PREFIX), known, n=1)
    hint = (
        f"did you mean {PREFIX}{near[0]}?"
        if near
        else "known are " + ", ".join(PREFIX + name for name in known)
    )
    return ConfigError(f"kv_connector_extra_config has the unknown key {key}: {hint}", setting=key)


def _check(good: bool, name: str, rule: str) -> None:
    if not good:
        raise ConfigError(f"{PREFIX}{name} {rule}.", setting=f"{PREFIX}{name}")
