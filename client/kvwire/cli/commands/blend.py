"""`kvwire blend`."""

from __future__ import annotations

from typing import Annotated, Any, Final

from cyclopts import Parameter

from kvwire.cli import render
from kvwire.cli.commands.lookup import NO_PROMPT, PromptFlags, namespace_of
from kvwire.cli.connect import ClientSettings, open_client
from kvwire.cli.flags import command_app, with_settings
from kvwire.cli.fleet import CALL_S, AsJson, FleetSettings, open_fleet, other_program, where

TEXT = """Which cached chunks occur anywhere in a prompt, not only at its beginning?

  kvwire blend --tokens-file prompt.json --namespace-from 127.0.0.1:7470
  kvwire blend --server --address 127.0.0.1:7470 --tokens-file prompt.json

It asks a coordinator, or with --server a cache server; either runs with --enable-blend-lookup.
A match is not permission to reuse: KV depends on its position and on all that came before it, and whoever
reuses it has to validate it."""

WARNING: Final = (
    "A match is not permission to reuse: KV depends on its position and on all that came before it."
)
FLEET: Final = {
    "complete": "the fleet's are among them",
    "not-asked": "of this server alone",
    "none": "of this server alone: no coordinator answered in time",
}

command = command_app("blend", TEXT)


@command.default
@with_settings(FleetSettings, "client")
def blend(
    settings: FleetSettings,
    *,
    prompt: Annotated[PromptFlags, Parameter(name="*")] = NO_PROMPT,
    namespace_from: Annotated[
        str,
        Parameter(help="Cache server whose registered namespace is meant.", show_default=False),
    ] = "",
    server: Annotated[
        bool, Parameter(help="The address is a cache server's.", negative=(), show_default=False)
    ] = False,
    output: render.Output = "table",
    as_json: AsJson = False,
) -> int:
    from kvwire.client.calls import namespace_message
    from kvwire.keys import pack_tokens

    tokens = pack_tokens(prompt.read())
    source = namespace_from or (settings.address if server else "")
    ask = _ask_server if server else _ask_fleet
    reply = ask(settings, namespace_message(namespace_of(prompt, source, settings)), tokens)
    if as_json or output == "json":
        render.print_json(reply)
    else:
        print_matches(render.plain(reply))
    return 0


def _ask_fleet(settings: ClientSettings, namespace: Any, tokens: bytes) -> Any:
    from kvwire.v1 import coordinator_service_pb2 as pb

    with open_fleet(settings, "blend") as fleet:
        return fleet.ask("MatchBlend", pb.MatchBlendRequest(namespace=namespace, tokens=tokens))


def _ask_server(settings: ClientSettings, namespace: Any, tokens: bytes) -> Any:
    import grpc
    from google.protobuf.duration_pb2 import Duration

    from kvwire.client.status import from_rpc_error
    from kvwire.v1 import cache_service_pb2, cache_service_pb2_grpc

    limit = settings.deadline or CALL_S
    # The server's own limit is below this.
    request = cache_service_pb2.CacheServiceMatchBlendRequest(
        namespace=namespace, tokens=tokens, fleet_deadline=Duration(seconds=1)
    )
    with open_client(settings, "blend") as client:
        stub = cache_service_pb2_grpc.CacheServiceStub(client.channel())
        try:
            return stub.MatchBlend(request, timeout=limit)
        except grpc.RpcError as error:
            found = from_rpc_error(error, address=str(client.target), method="MatchBlend", seconds=limit)
            raise other_program(found, "cache server") from None


def print_matches(reply: dict[str, Any]) -> None:
    matches = reply["matches"]
    told = FLEET.get(reply.get("fleet", ""), "")
    if matches:
        render.print_rows(
            ("#prompt position", "#cached position", "chunk key", "where"),
            [
                (
                    each["prompt_position"],
                    each["cached_position"],
                    each["chunk_key"],
                    where(each["placements"]),
                )
                for each in matches
            ],
        )
    print(f"{len(matches)} matches{f', {told}' if told else ''}.")
    print(WARNING)
