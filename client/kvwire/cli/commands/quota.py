"""`kvwire quota`."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from kvwire.cli import render, units
from kvwire.cli.admin import NO_SALT, NO_TENANT, AsJson, TenantFlags, TierOf, open_admin, tier_number
from kvwire.cli.app import OK
from kvwire.cli.connect import ClientSettings
from kvwire.cli.flags import command_app, with_settings
from kvwire.cli.fleet import tier_name
from kvwire.errors import ConfigError

TEXT = """How much may each tenant have, and how much has it?

  kvwire quota list
  kvwire quota set 2GiB --salt-file tenant-a.salt
  kvwire quota set 100GiB --tier l2 --tenant 5a1e96c1f0b2d3e4
  kvwire quota set 0 --tenant none

A tenant is whoever uses one cache salt. At its quota a tenant's own least recent prompts give way to its new
ones, and never those of others. At a coordinator's address a quota holds at every server of the fleet; of
that one and a server's own the smaller one holds."""
SET = """Limit a tenant. 0 ends the limit.

  kvwire quota set 2GiB --salt-file tenant-a.salt
  kvwire quota set 100GiB --tier l2 --tenant 5a1e96c1f0b2d3e4
  kvwire quota set 500MiB --tenant none --address 127.0.0.1:7570

The server keeps it over restarts: it needs --state there, and --policy tenant for a limit in memory. What is
above a lower limit is dropped soon. --tenant none is what has no salt."""
LIST = """Tenants that have a limit or use anything, by tier. A coordinator knows limits, and no use.

  kvwire quota list
  kvwire quota list --tenant 5a1e96c1f0b2d3e4 --json"""

command = command_app("quota", TEXT)
setting = command_app("set", SET)
listing = command_app("list", LIST)
command.command(setting)
command.command(listing)


@setting.default
@with_settings(ClientSettings, "client")
def set_quota(
    settings: ClientSettings,
    limit: Annotated[str, Parameter(help="A size such as 2GiB. 0: no limit.")],
    /,
    *,
    tenant: Annotated[TenantFlags, Parameter(name="*")] = NO_TENANT,
    tier: TierOf = "l1",
    output: render.Output = "table",
    as_json: AsJson = False,
) -> int:
    from kvwire.v1 import admin_service_pb2 as pb

    name = tenant.digest()
    if not name:
        raise ConfigError(
            f"Whose quota? Name the tenant by --salt-file or --tenant ({NO_SALT}: what has no salt).",
            setting="tenant",
        )
    request = pb.SetQuotaRequest(tenant=name, tier=tier_number(tier), limit_bytes=_size(limit))
    with open_admin(settings, "quota") as server:
        server.ask("SetQuota", request)
    if as_json or output == "json":
        render.print_json({"tenant": name, "tier": tier, "limit_bytes": request.limit_bytes})
    elif request.limit_bytes:
        print(f"tenant {name}: {units.format_size(request.limit_bytes)} in {tier.upper()}")
    else:
        print(f"tenant {name}: no limit in {tier.upper()}")
    return OK


@listing.default
@with_settings(ClientSettings, "client")
def list_quotas(
    settings: ClientSettings,
    *,
    tenant: Annotated[TenantFlags, Parameter(name="*")] = NO_TENANT,
    output: render.Output = "table",
    as_json: AsJson = False,
) -> int:
    from kvwire.v1 import admin_service_pb2 as pb

    with open_admin(settings, "quota") as server:
        reply = server.ask("GetQuota", pb.GetQuotaRequest(tenant=tenant.digest()))
    found = render.plain(reply)["quotas"]
    if as_json or output == "json":
        render.print_json({"quotas": found})
    elif found:
        render.print_rows(("tenant", "tier", "#limit", "#used", "#share"), map(_row, found))
    else:
        print("No tenant has a quota or uses anything.")
    return OK


def _row(quota: dict[str, Any]) -> tuple[object, ...]:
    limit, used = quota["limit_bytes"], quota["used_bytes"]
    return (
        quota["tenant"],
        tier_name(quota),
        units.format_size(limit) if limit else "-",
        units.format_size(used) if quota["backend"] else "-",
        f"{used / limit:.0%}" if limit and quota["backend"] else "-",
    )


def _size(text: str) -> int:
    try:
        size = units.parse_size(text)
    except ValueError as error:
        raise ConfigError(f"The limit {text!r} {error}.", setting="limit") from error
    if size >= 1 << 64:
        raise ConfigError(f"The limit {text!r} is larger than any store.", setting="limit")
    return size
