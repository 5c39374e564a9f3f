"""`kvwire prefetch`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from kvwire.cli import render
from kvwire.cli.admin import AsJson, Keys, check_named, chunks, open_admin
from kvwire.cli.app import FAILED, OK
from kvwire.cli.commands.lookup import NO_PROMPT, PromptFlags
from kvwire.cli.connect import ClientSettings
from kvwire.cli.flags import command_app, with_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT = """Bring what is cached of a prompt into a server's memory, from its lower tiers and other servers.

  kvwire prefetch --tokens-file prompt.json
  kvwire prefetch --keys 6f1c...,90ab... --timeout 60s

A lookup does the same for itself; this does it ahead of time. Nothing is computed: what nobody has stays
away, which is told and makes the exit code 1."""

WAIT_S: Final = 30.0

command = command_app("prefetch", TEXT)


@command.default
@with_settings(ClientSettings, "client")
def prefetch(
    settings: ClientSettings,
    *,
    prompt: Annotated[PromptFlags, Parameter(name="*")] = NO_PROMPT,
    keys: Keys = "",
    output: render.Output = "table",
    as_json: AsJson = False,
) -> int:
    from kvwire.v1 import admin_service_pb2 as pb

    check_named(prompt, keys)
    with open_admin(settings, "prefetch") as server:
        selector = server.selector(prompt, keys)
        reply = server.ask("Prefetch", pb.PrefetchRequest(selector=selector), WAIT_S)
    complete = reply.resident_chunks >= reply.asked_chunks
    if as_json or output == "json":
        found = render.plain(reply)
        found.pop("header", None)
        render.print_json(found)
    else:
        render.print_fields(list(_fields(reply)))
    if not complete:
        missing = chunks(reply.asked_chunks - reply.resident_chunks)
        print(f"kvwire: {reply.error.message or f'nobody who was asked has {missing}'}", file=sys.stderr)
    return OK if complete else FAILED


def _fields(reply: Any) -> Iterator[tuple[str, str]]:
    yield "in memory", f"the first {reply.resident_chunks} of {chunks(reply.asked_chunks)}"
    yield "from L2", chunks(reply.l2_chunks)
    yield "from other servers", chunks(reply.peer_chunks)
