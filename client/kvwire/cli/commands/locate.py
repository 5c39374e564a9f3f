"""`kvwire locate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from kvwire.cli import render, units
from kvwire.cli.commands.lookup import NO_PROMPT, PromptFlags, namespace_of
from kvwire.cli.flags import command_app, with_settings
from kvwire.cli.fleet import (
    AsJson,
    FleetClient,
    FleetSettings,
    open_fleet,
    parse_keys,
    seconds,
    tier_name,
    visible,
    where,
)
from kvwire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT = """Which servers of a fleet are thought to hold the chunks of a prompt?

  kvwire locate --tokens-file prompt.json --namespace-from 127.0.0.1:7470
  kvwire locate --tokens 1,2,3,4 --model my-model --placements
  kvwire locate --keys 6f1c... --json
  kvwire locate --all --limit 20

What a coordinator tells is a hint: the server that it names decides. A coordinator knows no models, so the
namespace is named, or taken from a cache server of the fleet (--namespace-from), as `kvwire lookup` does."""

PAGE = 1000

command = command_app("locate", TEXT)


@command.default
@with_settings(FleetSettings, "client")
def locate(
    settings: FleetSettings,
    *,
    prompt: Annotated[PromptFlags, Parameter(name="*")] = NO_PROMPT,
    keys: Annotated[
        str, Parameter(help="Chunk keys in hex, in the order of the prompt.", show_default=False)
    ] = "",
    namespace_from: Annotated[
        str,
        Parameter(help="Cache server whose registered namespace is meant.", show_default=False),
    ] = "",
    placements: Annotated[
        bool, Parameter(help="Also list where each chunk is.", negative=(), show_default=False)
    ] = False,
    everything: Annotated[
        bool, Parameter(name="--all", help="List all chunks instead.", negative=(), show_default=False)
    ] = False,
    limit: Annotated[int, Parameter(help="Most chunks that --all lists. 0: all of them.")] = 1000,
    output: render.Output = "table",
    as_json: AsJson = False,
) -> int:
    as_json = as_json or output == "json"
    _check(prompt, keys, everything=everything, limit=limit)
    with open_fleet(settings, "locate") as fleet:
        if everything:
            _list(fleet, limit, as_json=as_json)
        else:
            _locate(fleet, _request(prompt, keys, namespace_from, settings), placements, as_json=as_json)
    return 0


def _check(prompt: PromptFlags, keys: str, *, everything: bool, limit: int) -> None:
    given = [
        name for name, value in (("a prompt", prompt.given), ("--keys", keys), ("--all", everything)) if value
    ]
    if len(given) != 1:
        told = " and ".join(given) if given else "none of them was"
        raise ConfigError(
            f"Name what to locate by one of a prompt (--tokens, --tokens-file, --text), --keys and --all; "
            f"{told} given.",
            setting="keys",
        )
    if limit < 0:
        raise ConfigError("--limit must not be negative.", setting="limit")


def _request(prompt: PromptFlags, keys: str, namespace_from: str, settings: FleetSettings) -> Any:
    from kvwire.client.calls import namespace_message
    from kvwire.keys import pack_tokens
    from kvwire.v1 import coordinator_service_pb2 as pb

    if keys:
        return pb.LocateChunksRequest(chunk_keys=pb.LocateKeys(keys=parse_keys(keys)))
    tokens = pack_tokens(prompt.read())
    namespace = namespace_of(prompt, namespace_from, settings)
    return pb.LocateChunksRequest(namespace=namespace_message(namespace), tokens=tokens)


def _locate(fleet: FleetClient, request: Any, placements: bool, *, as_json: bool) -> None:
    from kvwire.v1 import coordinator_service_pb2 as pb

    request.with_placements = placements
    reply = fleet.ask("LocateChunks", request)
    if as_json:
        render.print_json(reply)
        return
    chunk_size = fleet.ask("GetDirectoryStats", pb.GetDirectoryStatsRequest()).chunk_size
    render.print_fields(
        [
            ("asked", f"{reply.asked_chunks} whole chunks of {chunk_size or '?'} tokens"),
            ("combined prefix", _length(reply.combined_prefix_chunks, chunk_size)),
        ]
    )
    if reply.servers:
        render.print_rows(
            ("server", "addresses", "#prefix"),
            [
                (
                    visible(each.server_id),
                    ", ".join(map(visible, each.addresses)) or "not reachable",
                    _length(each.prefix_chunks, chunk_size),
                )
                for each in reply.servers
            ],
            title="\nprefixes",
        )
    if placements:
        _print_chunks(render.plain(reply)["chunks"])


def _length(chunks: int, chunk_size: int) -> str:
    return f"{chunks} chunks, {chunks * chunk_size} tokens" if chunk_size else f"{chunks} chunks"


def _list(fleet: FleetClient, limit: int, *, as_json: bool) -> None:
    chunks = list(_pages(fleet, limit))
    if as_json:
        render.print_json({"chunks": chunks})
        return
    if not chunks:
        print("No chunk is known.")
        return
    _print_chunks(render.plain(chunks))
    if limit and len(chunks) == limit:
        print(f"(the first {limit}; --limit lists more)")


def _pages(fleet: FleetClient, limit: int) -> Iterator[Any]:
    from kvwire.v1 import coordinator_service_pb2 as pb

    token, left = "", limit
    while True:
        size = min(PAGE, left) if limit else PAGE
        reply = fleet.ask("ListChunks", pb.ListChunksRequest(page_size=size, page_token=token))
        yield from reply.chunks
        token, left = reply.next_page_token, left - len(reply.chunks)
        if not token or (limit and left <= 0):
            return


def _print_chunks(chunks: list[dict[str, Any]]) -> None:
    rows = [row for position, chunk in enumerate(chunks) for row in _chunk_rows(position, chunk)]
    render.print_rows(("#", "chunk key", "server", "where", "#size", "#told"), rows, title="\nchunks")


def _chunk_rows(position: int, chunk: dict[str, Any]) -> Iterator[tuple[object, ...]]:
    if not chunk["placements"]:
        yield position, chunk["chunk_key"], where(()), "-", "-", "-"
    for each in chunk["placements"]:
        yield (
            position,
            chunk["chunk_key"],
            visible(each["server_id"]),
            tier_name(each),
            units.format_size(each["size_bytes"]),
            f"{seconds(each.get('age'))} ago",
        )
