"""`kvwire clear`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from kvwire.cli import render
from kvwire.cli.admin import (
    NO_TENANT,
    AdminClient,
    AsJson,
    TenantFlags,
    Tier,
    Yes,
    agreed,
    chunks,
    open_admin,
    tier_number,
)
from kvwire.cli.app import FAILED, OK
from kvwire.cli.commands.evict import WHERE, tell_kept
from kvwire.cli.commands.lookup import choose_namespace, fingerprint
from kvwire.cli.connect import ClientSettings
from kvwire.cli.flags import command_app, with_settings
from kvwire.errors import ConfigError

if TYPE_CHECKING:
    from kvwire.keys import Namespace

TEXT = """Drop what a server has cached: of one model, of one tenant, or everything.

  kvwire clear --model my-model
  kvwire clear --tenant 5a1e96c1f0b2d3e4 --tier l1
  kvwire clear --all --yes

It asks first, unless --yes is given. Engines go on: what they ask for next is computed and stored again. What
a request is reading or writing at this moment, and what is pinned, stays, is told as kept, and makes the exit
code 1: run the command again when it is idle. A model stands for one namespace, with its adapters and
tenants; of several with one name, choose by --layout-fingerprint (see `kvwire status`). A chunk in several
tiers counts in each. An engine does the same for itself when vLLM is asked to:
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
    tenant: Annotated[TenantFlags, Parameter(name="*")] = NO_TENANT,
    everything: Annotated[
        bool, Parameter(name="--all", help="Drop all of it.", negative=(), show_default=False)
    ] = False,
    tier: Tier = "all",
    yes: Yes = False,
    output: render.Output = "table",
    as_json: AsJson = False,
) -> int:
    from kvwire.client.calls import namespace_message
    from kvwire.v1 import admin_service_pb2 as pb

    owner = tenant.digest()
    if bool(model or owner) is everything:
        raise ConfigError(
            "Say what to drop: --model NAME, a tenant (--tenant, --salt-file), or --all for everything.",
            setting="model",
        )
    request = pb.ClearRequest(tier=tier_number(tier), tenant=owner)
    with open_admin(settings, "clear") as server:
        if model:
            namespace = _namespace(server, model, layout_fingerprint)
            request.namespace.CopyFrom(namespace_message(namespace))
        what = " ".join([f"of model {model}"] * bool(model) + [f"of tenant {owner}"] * bool(owner))
        if not agreed(f"Drop all {what or 'chunks'} from {WHERE[tier]} of {server.target}?", yes=yes):
            return FAILED
        done = server.ask("Clear", request)
    if as_json or output == "json":
        render.print_json({"cleared_chunks": done.cleared_chunks, "kept_chunks": done.kept_chunks})
    else:
        print(f"dropped {chunks(done.cleared_chunks)}, kept {done.kept_chunks}")
    if done.kept_chunks:
        tell_kept(done.kept_chunks)
    return FAILED if done.kept_chunks else OK


def _namespace(server: AdminClient, model: str, layout_fingerprint: str) -> Namespace:
    given = {"model": model, "layout_fingerprint": fingerprint(layout_fingerprint)}
    given = {name: value for name, value in given.items() if value}
    return choose_namespace(server.client, given, server.settings)
