"""`kvwire members`."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from kvwire.cli import render, units
from kvwire.cli.flags import command_app, with_settings
from kvwire.cli.fleet import AsJson, FleetClient, FleetSettings, open_fleet, seconds, tier_name, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT = """Which cache servers are in a fleet, and do their events arrive?

  kvwire members
  kvwire members --address 127.0.0.1:7570 --json | jq '.members[].server.server_id'
  kvwire members --watch

With --watch the table is drawn anew every second until Ctrl-C; with --json it is one line for each change.

Being alive and reporting are two facts. Events are current, lagging (some are on their way), resyncing (what
the server holds is being fetched from it) or silent (it is alive, and what it reports does not arrive).

Exit code 3 when nobody answers."""

EVERY_S: Final = 1.0
CLEAR: Final = "\x1b[H\x1b[2J"

command = command_app("members", TEXT)


@command.default
@with_settings(FleetSettings, "client")
def members(
    settings: FleetSettings,
    *,
    watch: Annotated[bool, Parameter(help="Until Ctrl-C.", negative=(), show_default=False)] = False,
    output: render.Output = "table",
    as_json: AsJson = False,
) -> int:
    as_json = as_json or output == "json"
    with open_fleet(settings, "members") as fleet:
        if watch and as_json:
            _follow(fleet)
            return 0
        while True:
            _show(fleet, as_json=as_json, anew=watch)
            if not watch:
                return 0
            time.sleep(EVERY_S)


def _show(fleet: FleetClient, *, as_json: bool, anew: bool) -> None:
    from kvwire.v1 import coordinator_service_pb2 as pb

    reply = fleet.ask("ListServers", pb.ListServersRequest())
    if as_json:
        render.print_json(reply)
        return
    if anew:
        print(CLEAR if sys.stdout.isatty() else "", end="")
        print(f"{time.strftime('%H:%M:%S')}  {fleet.client.target}\n")
    print_members(render.plain(reply)["members"])
    sys.stdout.flush()


def _follow(fleet: FleetClient) -> None:
    from kvwire.v1 import coordinator_service_pb2 as pb

    for change in fleet.watch("WatchServers", pb.WatchServersRequest()):
        sys.stdout.write(json.dumps(render.plain(change)) + "\n")
        sys.stdout.flush()


def print_members(found: list[dict[str, Any]]) -> None:
    if not found:
        print("The fleet has no members: start servers with --coordinator.")
        return
    render.print_rows(
        (
            "server",
            "addresses",
            "version",
            "#chunk",
            "sharing",
            "#heartbeat",
            "events",
            "#lag",
            "fill",
            "#hit rate",
            "#placements",
        ),
        [_row(each) for each in found],
    )
    problems = list(_problems(found))
    if problems:
        print()
        render.print_fields(problems)


def _row(member: dict[str, Any]) -> tuple[object, ...]:
    server = member["server"]
    heartbeat = member.get("heartbeat_age")
    return (
        visible(server["server_id"]),
        "\n".join(map(visible, server["addresses"])) or "-",
        visible(server["version"]) or "-",
        server["chunk_size"] or "-",
        "yes" if member["sharing"] else "no",
        f"{heartbeat:.1f} s" if heartbeat is not None else "-",
        member["reporting"] or "?",
        _lag(member),
        "\n".join(map(_fill, member["tiers"])) or "-",
        hit_rate(member),
        member["placements"],
    )


def _lag(member: dict[str, Any]) -> str:
    behind = max(member["closed_sequence"] - member["applied_sequence"], 0)
    told = seconds(member.get("event_lag"))
    return f"{told}, {behind} behind" if behind else told


def _fill(tier: dict[str, Any]) -> str:
    used, capacity = tier["used_bytes"], tier["capacity_bytes"]
    if not capacity:
        return f"{tier_name(tier)}: {units.format_size(used)}"
    share = f"{units.format_size(used)} of {units.format_size(capacity)} ({used / capacity:.0%})"
    return f"{tier_name(tier)}: {share}"


def hit_rate(member: dict[str, Any]) -> str:
    asked = member["asked_tokens"]
    return f"{member['hit_tokens'] / asked:.1%}" if asked else "-"


def _problems(found: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for member in found:
        name = visible(member["server"]["server_id"])
        if member["sharing_problem"]:
            yield f"NOT SHARING {name}", visible(member["sharing_problem"])
        if member["reporting"] == "silent":
            yield f"SILENT {name}", "it is alive, but its events do not arrive"
