"""How the commands reach a coordinator, and what they share in showing a fleet."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from kvwire.cli import units
from kvwire.cli.connect import ClientSettings, open_client
from kvwire.cli.settings import setting
from kvwire.errors import ConfigError, KvwireError, NotImplementedYet

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import grpc

    from kvwire.client import Client

DEFAULT_COORDINATOR: Final = "127.0.0.1:7570"
CALL_S: Final = 10.0

AsJson = Annotated[
    bool, Parameter(name="--json", help="The same as --output json.", negative=(), show_default=False)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings(ClientSettings):
    """Section `client` of the settings file, for an address that is a coordinator's."""

    address: str = setting("The coordinator: unix:PATH or HOST:PORT.", DEFAULT_COORDINATOR)


class FleetClient:
    """Calls of CoordinatorService; every failure is a typed error."""

    def __init__(self, client: Client, seconds: float) -> None:
        from kvwire.v1 import coordinator_service_pb2_grpc

        self.client = client
        self._seconds = seconds
        self._stub = coordinator_service_pb2_grpc.CoordinatorServiceStub(client.channel())

    def ask(self, method: str, request: Any) -> Any:
        import grpc

        try:
            return getattr(self._stub, method)(request, timeout=self._seconds)
        except grpc.RpcError as error:
            raise self._typed(error, method, self._seconds) from None

    def watch(self, method: str, request: Any) -> Iterator[Any]:
        """A stream without an end."""
        import grpc

        stream = getattr(self._stub, method)(request)
        try:
            yield from stream
        except grpc.RpcError as error:
            raise self._typed(error, method, None) from None
        finally:
            stream.cancel()

    def _typed(self, error: grpc.RpcError, method: str, seconds: float | None) -> KvwireError:
        from kvwire.client.status import from_rpc_error

        return other_program(
            from_rpc_error(error, address=str(self.client.target), method=method, seconds=seconds),
            "coordinator",
        )


@contextmanager
def open_fleet(settings: ClientSettings, name: str) -> Iterator[FleetClient]:
    with open_client(settings, name) as client:
        yield FleetClient(client, settings.deadline or CALL_S)


def other_program(error: KvwireError, wanted: str) -> KvwireError:
    """One clear line where the address is another program's. What a program says itself stays."""
    if not isinstance(error, NotImplementedYet) or "address" not in error.metadata:
        return error
    address = error.metadata["address"]
    hint = (
        "name a coordinator by --address"
        if wanted == "coordinator"
        else "name a cache server by --address, or leave out --server"
    )
    return NotImplementedYet(
        f"The program at {address} is no {wanted} (or one of an older version): {hint}.",
        address=address,
        method=error.metadata.get("method", ""),
    )


def visible(text: object) -> str:
    """Names come from anybody who may register: none of them may steer a terminal."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(text)
    )


def parse_keys(text: str) -> list[bytes]:
    """Chunk keys in hex, separated by commas or spaces. Raises ConfigError."""
    keys = []
    for word in text.replace(",", " ").split():
        try:
            key = bytes.fromhex(word)
        except ValueError:
            key = b""
        if len(key) != 32:
            raise ConfigError(
                f"--keys: {word!r} is no chunk key: 64 hex digits, as `kvwire locate --all` shows them.",
                setting="keys",
            )
        keys.append(key)
    return keys


def tier_name(tier: dict[str, Any]) -> str:
    name = visible(tier["tier"]).upper() or "?"
    return f"{name} {visible(tier['backend'])}".rstrip()


def seconds(value: Any) -> str:
    """Of a duration in plain form. - when it is not known."""
    return units.format_duration(value) if isinstance(value, float | int) else "-"


def where(placements: Sequence[dict[str, Any]]) -> str:
    told = (f"{visible(each['server_id'])} ({tier_name(each)})" for each in placements)
    return ", ".join(told) or "-"
