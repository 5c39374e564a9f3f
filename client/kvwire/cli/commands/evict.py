"""`kvwire evict`."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from kvwire.cli import render
from kvwire.cli.admin import AsJson, Keys, Tier, Yes, agreed, check_named, chunks, open_admin, tier_number
from kvwire.cli.app import FAILED, OK
from kvwire.cli.commands.lookup import NO_PROMPT, PromptFlags
from kvwire.cli.connect import ClientSettings
from kvwire.cli.flags import command_app, with_settings

TEXT = """Drop the chunks of one prompt that a server has cached, and nothing else.

  kvwire evict --tokens-file prompt.json
  kvwire evict --keys 6f1c...,90ab... --tier l2 --yes

What a request reads or writes at this moment, and what is pinned, stays, is told as kept, and makes the exit
code 1. A chunk in several tiers counts in each."""

WHERE = {"all": "all tiers", "l1": "the memory", "l2": "the tiers below the memory"}

command = command_app("evict", TEXT)


@command.default
@with_settings(ClientSettings, "client")
def evict(
    settings: ClientSettings,
    *,
    prompt: Annotated[PromptFlags, Parameter(name="*")] = NO_PROMPT,
    keys: Keys = "",
    tier: Tier = "all",
    yes: Yes = False,
    output: render.Output = "table",
    as_json: AsJson = False,
) -> int:
    from kvwire.v1 import admin_service_pb2 as pb

    check_named(prompt, keys)
    with open_admin(settings, "evict") as server:
        selector = server.selector(prompt, keys)
        if not agreed(f"Drop these chunks from {WHERE[tier]} of {server.target}?", yes=yes):
            return FAILED
        done = server.ask("Evict", pb.EvictRequest(selector=selector, tier=tier_number(tier)))
    if as_json or output == "json":
        render.print_json({"evicted_chunks": done.evicted_chunks, "kept_chunks": done.kept_chunks})
    else:
        print(f"dropped {chunks(done.evicted_chunks)}, kept {done.kept_chunks}")
    if done.kept_chunks:
        tell_kept(done.kept_chunks)
    return FAILED if done.kept_chunks else OK


def tell_kept(count: int) -> None:
    verb = "are" if count != 1 else "is"
    told = f"kvwire: {chunks(count)} {verb} in use or pinned, and stayed."
    print(told, file=sys.stderr)
