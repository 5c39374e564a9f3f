"""`kvwire events`."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

from cyclopts import Parameter

from kvwire.cli import render, units
from kvwire.cli.flags import command_app, with_settings
from kvwire.cli.fleet import AsJson, FleetSettings, open_fleet, seconds, tier_name, visible

TEXT = """What do the servers of a fleet report? One line for each batch of events, until Ctrl-C.

  kvwire events
  kvwire events --address 127.0.0.1:7570 --server server-1 --json
  kvwire events --stats

With --json each line is one object. With --stats it prints what the coordinator has counted, and ends."""

command = command_app("events", TEXT)


@command.default
@with_settings(FleetSettings, "client")
def events(
    settings: FleetSettings,
    *,
    server: Annotated[str, Parameter(help="Only of this server id.", show_default=False)] = "",
    count: Annotated[int, Parameter(help="End after so many batches. 0: never.")] = 0,
    stats: Annotated[
        bool, Parameter(help="Print the state of the directory once.", negative=(), show_default=False)
    ] = False,
    output: render.Output = "table",
    as_json: AsJson = False,
) -> int:
    from kvwire.v1 import coordinator_service_pb2 as pb

    as_json = as_json or output == "json"
    with open_fleet(settings, "events") as fleet:
        # Also tells at once whether a coordinator is there: a stream without events says nothing.
        told = fleet.ask("GetDirectoryStats", pb.GetDirectoryStatsRequest())
        if stats:
            print_stats(told, as_json=as_json)
            return 0
        batches = fleet.watch("WatchEvents", pb.WatchEventsRequest(server_id=server))
        for seen, batch in enumerate(batches, 1):
            plain = render.plain(batch)
            sys.stdout.write((json.dumps(plain) if as_json else line(plain)) + "\n")
            sys.stdout.flush()
            if seen == count:
                break
    return 0


def line(batch: dict[str, Any]) -> str:
    kinds = ("stored_chunks", "stored"), ("accessed_chunks", "used"), ("deleted_chunks", "gone")
    what = [f"{batch[name]} {word}" for name, word in kinds if batch[name]]
    if batch["clears"]:
        what.append(f"{batch['clears']} cleared")
    told = f"{time.strftime('%H:%M:%S')}  {visible(batch['server_id'])}  #{batch['sequence']}"
    told += f"  {batch['admission'] or '?'}  {', '.join(what) or 'nothing'}"
    told += f"  lag {seconds(batch.get('lag'))}  by {batch['source']}"
    if batch["lost"]:
        told += f"  {batch['lost']} batches lost by the server before it"
    if batch["missed"]:
        told += f"  {batch['missed']} batches not shown before it"
    return told


def print_stats(reply: Any, *, as_json: bool) -> None:
    if as_json:
        render.print_json(reply)
        return
    blend = f"{reply.blend_chunks} chunks" if reply.blend_enabled else "off"
    render.print_fields(
        [
            ("coordinator", f"kvwire {reply.coordinator_version}, run {reply.coordinator_incarnation.hex()}"),
            ("events from", ", ".join(reply.sources)),
            ("checkpoint", reply.checkpoint),
            ("chunk size", f"{reply.chunk_size} tokens" if reply.chunk_size else "no member has one"),
            ("blend index", blend),
            ("keys", str(reply.keys)),
            ("placements", f"{reply.placements}, {units.format_size(reply.placement_bytes)}"),
            ("batches", f"{reply.admitted_batches} admitted, {reply.duplicate_batches} known already"),
            ("", f"{reply.stale_batches} of earlier runs, {reply.refused_batches} of strangers"),
            ("gaps", f"{reply.gaps} missing batches, {reply.resyncs} snapshots fetched"),
            ("events", f"{reply.applied_events} applied, {reply.skipped_events} skipped"),
        ]
    )
    if reply.holdings:
        render.print_rows(
            ("server", "where", "#placements", "#size"),
            [
                (
                    visible(each["server_id"]),
                    tier_name(each),
                    each["placements"],
                    units.format_size(each["placement_bytes"]),
                )
                for each in render.plain(reply)["holdings"]
            ],
            title="\nholdings",
        )
