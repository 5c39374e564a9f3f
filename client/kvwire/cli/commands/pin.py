"""`kvwire pin`."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from kvwire.cli import render
from kvwire.cli.admin import AsJson, Keys, NamespaceFrom, check_named, chunks, open_admin
from kvwire.cli.app import OK
from kvwire.cli.commands.lookup import NO_PROMPT, PromptFlags
from kvwire.cli.connect import ClientSettings
from kvwire.cli.flags import command_app, with_settings

TEXT = """Keep the chunks of a prompt in memory, whoever else needs the room, until the pin is removed.

  kvwire pin --tokens-file system-prompt.json
  kvwire pin --keys 6f1c...,90ab... --remove
  kvwire pin --address 127.0.0.1:7570 --tokens-file system-prompt.json --namespace-from 127.0.0.1:7470

A pin holds what is there and what is stored later, over restarts of the server: it needs --state there. At a
coordinator's address it holds at every server of the fleet. Pins of one server may hold 90 % of its memory.
A coordinator knows no models: name the namespace, or take it from a cache server (--namespace-from)."""

command = command_app("pin", TEXT)


@command.default
@with_settings(ClientSettings, "client")
def pin(
    settings: ClientSettings,
    *,
    prompt: Annotated[PromptFlags, Parameter(name="*")] = NO_PROMPT,
    keys: Keys = "",
    namespace_from: NamespaceFrom = "",
    remove: Annotated[bool, Parameter(help="End the pin.", negative=(), show_default=False)] = False,
    output: render.Output = "table",
    as_json: AsJson = False,
) -> int:
    from kvwire.v1 import admin_service_pb2 as pb

    check_named(prompt, keys)
    with open_admin(settings, "pin") as server:
        selector = server.selector(prompt, keys, namespace_from)
        if remove:
            reply = server.ask("Unpin", pb.UnpinRequest(selector=selector))
            told, count = "unpinned_chunks", reply.unpinned_chunks
        else:
            reply = server.ask("Pin", pb.PinRequest(selector=selector))
            told, count = "pinned_chunks", reply.pinned_chunks
    if as_json or output == "json":
        render.print_json({told: count})
    else:
        print(f"{'unpinned' if remove else 'pinned'} {chunks(count)}")
    if not remove and not count:
        print("kvwire: the prompt is shorter than one chunk: nothing to pin.", file=sys.stderr)
    return OK
