"""What operators' commands share: calls of AdminService, naming chunks and tenants, asking first."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import Parameter

from kvwire.cli.commands.lookup import PromptFlags, choose_namespace, namespace_of
from kvwire.cli.connect import ClientSettings, open_client
from kvwire.cli.fleet import CALL_S, AsJson, parse_keys
from kvwire.errors import ConfigError, NotImplementedYet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.client import Client
    from kvwire.keys import Namespace

__all__ = [
    "NO_SALT",
    "NO_TENANT",
    "AdminClient",
    "AsJson",
    "Keys",
    "NamespaceFrom",
    "TenantFlags",
    "Tier",
    "TierOf",
    "Yes",
    "agreed",
    "check_named",
    "chunks",
    "open_admin",
    "tier_number",
]

NO_SALT: Final = "none"

TierName = Literal["all", "l1", "l2"]
Tier = Annotated[TierName, Parameter(help="l1 is the memory, l2 what lies below it.")]
TierOf = Annotated[Literal["l1", "l2"], Parameter(help="l1 is the memory, l2 what lies below it.")]
Yes = Annotated[bool, Parameter(help="Do not ask first.", negative=(), show_default=False)]
Keys = Annotated[str, Parameter(help="Chunk keys in hex, instead of a prompt.", show_default=False)]
NamespaceFrom = Annotated[
    str, Parameter(help="Cache server whose registered namespace is meant.", show_default=False)
]


@dataclass(frozen=True, kw_only=True)
class TenantFlags:
    """A tenant, as the commands take it. Its salt goes nowhere: its digest is made here."""

    tenant: Annotated[
        str,
        Parameter(help="Digest of the tenant's salt, or none: what has no salt.", show_default=False),
    ] = ""
    salt_file: Annotated[
        str, Parameter(help="File with the tenant's salt, which is never shown.", show_default=False)
    ] = ""

    def digest(self) -> str:
        """Empty: no tenant was named. Raises ConfigError."""
        from kvwire.keys import salt_digest

        if self.tenant and self.salt_file:
            raise ConfigError("Name the tenant by one of --tenant and --salt-file.", setting="tenant")
        if not self.salt_file:
            return self.tenant
        try:
            salt = Path(self.salt_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--salt-file {self.salt_file}: {error}.", setting="salt_file") from error
        if not salt:
            raise ConfigError(
                f"--salt-file {self.salt_file} is empty. What has no salt is named by --tenant {NO_SALT}.",
                setting="salt_file",
            )
        return salt_digest(salt)


NO_TENANT: Final = TenantFlags()


class AdminClient:
    """Every failure is a typed error."""

    def __init__(self, client: Client, settings: ClientSettings) -> None:
        from kvwire.v1 import admin_service_pb2_grpc

        self.client = client
        self.settings = settings
        self._stub = admin_service_pb2_grpc.AdminServiceStub(client.channel())

    @property
    def target(self) -> str:
        return str(self.client.target)

    def ask(self, method: str, request: Any, seconds: float = CALL_S) -> Any:
        import grpc

        from kvwire.client.status import from_rpc_error

        seconds = self.settings.deadline or seconds
        try:
            return getattr(self._stub, method)(request, timeout=seconds)
        except grpc.RpcError as error:
            raise from_rpc_error(error, address=self.target, method=method, seconds=seconds) from None

    def selector(self, prompt: PromptFlags, keys: str, namespace_from: str = "") -> Any:
        """The chunks that were named: by keys, or by a prompt and its namespace."""
        from kvwire.client.calls import namespace_message
        from kvwire.keys import pack_tokens
        from kvwire.v1 import admin_service_pb2 as pb
        from kvwire.v1 import cache_service_pb2

        if keys:
            return pb.PromptSelector(chunk_keys=cache_service_pb2.ChunkKeys(keys=parse_keys(keys)))
        tokens = pack_tokens(prompt.read())
        namespace = self._namespace(prompt, namespace_from)
        return pb.PromptSelector(namespace=namespace_message(namespace), tokens=tokens)

    def _namespace(self, prompt: PromptFlags, namespace_from: str) -> Namespace:
        if namespace_from:
            return namespace_of(prompt, namespace_from, self.settings)
        try:
            return choose_namespace(self.client, prompt.names(), self.settings)
        except NotImplementedYet:
            # A coordinator knows no namespaces.
            return namespace_of(prompt, "", self.settings)


@contextmanager
def open_admin(settings: ClientSettings, name: str) -> Iterator[AdminClient]:
    with open_client(settings, name) as client:
        yield AdminClient(client, settings)


def check_named(prompt: PromptFlags, keys: str) -> None:
    """Raises ConfigError unless chunks are named in exactly one way."""
    if bool(keys) is prompt.given:
        told = "and not by both" if keys else "neither of them was given"
        raise ConfigError(
            f"Name the chunks by a prompt (--tokens, --tokens-file, --text) or by --keys; {told}.",
            setting="keys",
        )


def tier_number(name: str) -> Any:
    return {"all": 0, "l1": 1, "l2": 2}[name]


def agreed(question: str, *, yes: bool) -> bool:
    """Whether the operator means it. Raises ConfigError where nobody can be asked."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError(
            f"{question} There is no terminal to ask at: say --yes if that is meant.", setting="yes"
        )
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    print("Nothing was changed.", file=sys.stderr)
    return False


def chunks(count: int) -> str:
    return f"{count:,} chunk{'s' if count != 1 else ''}"
