"""`kvwire clear`."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from kvwire.cli import render
from kvwire.cli.app import FAILED, OK
from kvwire.cli.commands.lookup import choose_namespace, fingerprint
from kvwire.cli.connect import ClientSettings, open_client
from kvwire.cli.flags import command_app, with_settings
from kvwire.errors import ConfigError

TEXT = """Drop what a server has cached: of one model, or everything.

  kvwire clear --model my-model
  kvwire clear --all

Engines go on: what they ask for next is computed and stored again. What a request is reading or writing at
this moment stays, is told as kept, and makes the exit code 1: run the command again when it is idle. A model
stands for one namespace, with its adapters and tenants; of several with one name, choose by
--layout-fingerprint (see `kvwire status`). An engine does the same for itself when vLLM is asked to:
POST /reset_prefix_cache?reset_external=true."""

command = command_app("clear", TEXT)


@command.default
@with_settings(ClientSettings, "client")
def clear(
    settings: ClientSettings,
    *,
    model: Annotated[str, Parameter(help="The model to drop.", show_default=False)] = "",
    layout_fingerprint: Annotated[
        str, Parameter(help="Layout fingerprint of the namespace, in hex.", show_default=False)
    ] = "",
    everything: Annotated[
        bool, Parameter(name="--all", help="Drop all models.", negative=(), show_default=False)
    ] = False,
    output: render.Output = "table",
) -> int:
    if bool(model) is everything:
        raise ConfigError("Say what to drop: --model NAME, or --all for everything.", setting="model")
    with open_client(settings, "clear") as client:
        namespace = None
        if model:
            given = {"model": model, "layout_fingerprint": fingerprint(layout_fingerprint)}
            given = {name: value for name, value in given.items() if value}
            namespace = choose_namespace(client, given, settings)
        done = client.clear(namespace, timeout=settings.deadline)
    if output == "json":
        render.print_json({"cleared_chunks": done.cleared_chunks, "kept_chunks": done.kept_chunks})
    else:
        print(f"dropped {done.cleared_chunks} chunks, kept {done.kept_chunks}")
    if done.kept_chunks:
        print(f"kvwire: {done.kept_chunks} chunks are in use and were kept.", file=sys.stderr)
    return FAILED if done.kept_chunks else OK
