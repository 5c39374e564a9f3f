"""`kvwire status`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvwire.cli import render, units
from kvwire.cli.connect import ClientSettings, open_client
from kvwire.cli.flags import command_app, with_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.v1 import admin_service_pb2 as admin

TEXT = """What a server holds, who uses it, and whether it is well.

  kvwire status
  kvwire status --address unix:/run/kvwire.sock -o json | jq .memory

Exit code 1 when a background task of the server has died (it is NOT_SERVING then), 3 when nobody answers."""

command = command_app("status", TEXT)


@command.default
@with_settings(ClientSettings, "client")
def status(settings: ClientSettings, *, output: render.Output = "table") -> int:
    with open_client(settings, "status") as client:
        reply = client.status(timeout=settings.deadline)
    if output == "json":
        render.print_json(reply)
    else:
        print_status(reply)
    return int(any(not task.running and task.error for task in reply.tasks))


def print_status(reply: admin.GetStatusResponse) -> None:
    fields = [*_server(reply), *_cache(reply), *_traffic(reply), *_events(reply), *_problems(reply)]
    render.print_fields(fields)
    told = render.plain(reply)
    if reply.tiers:
        render.print_rows(
            ("tier", "#used", "#size", "#chunks", "store", "#waiting", "written", "read", "gone wrong"),
            [_tier_row(each) for each in reply.tiers],
            title="\nlower tiers",
        )
    if reply.sharing.peers:
        render.print_rows(
            ("server", "address", "path", "#chunks", "#fetched", "gone wrong", "problem"),
            [_peer_row(each) for each in reply.sharing.peers],
            title="\nother servers",
        )
    if reply.coordinators:
        render.print_rows(
            ("coordinator", "member", "events", "#arrived", "#answered", "problem"),
            [_link_row(each, reply) for each in reply.coordinators],
            title="\ncoordinators",
        )
    if told["registrations"]:
        render.print_rows(
            ("client", "engine", "role", "#rank", "path", "why", "attached", "#idle"),
            [_client_row(each) for each in told["registrations"]],
            title="\nclients",
        )
    if told["refused"]:
        render.print_rows(
            ("client", "reason", "#times", "#last", "told"),
            [_refused_row(each) for each in told["refused"]],
            title="\nturned away",
        )
    if told["namespaces"]:
        render.print_rows(
            ("model", "revision", "kv dtype", "fingerprint", "#ranks", "groups", "#clients"),
            [_namespace_row(each) for each in told["namespaces"]],
            title="\nnamespaces",
        )


def _server(reply: admin.GetStatusResponse) -> Iterator[tuple[str, str]]:
    up = time.time() - reply.started_at.ToNanoseconds() / 1e9
    state = "draining" if reply.draining else "serving"
    name = reply.server_id or "server"
    yield "server", f"{name}, {state} for {units.format_duration(max(up, 0))}, kvwire {reply.server_version}"
    yield "incarnation", reply.header.incarnation.hex()
    yield "addresses", ", ".join(reply.addresses)
    yield "data paths", ", ".join(render.plain(reply)["data_paths"])
    size = reply.chunk_size
    if size.chunk_size:
        told = f"{size.chunk_size} tokens, alignment {size.alignment}, bound by {size.bound_by or 'a client'}"
    else:
        told = f"not negotiated yet, at least {size.minimum} tokens"
    waiting = [binder.name for binder in size.binders if not binder.bound]
    if waiting and size.chunk_size:
        told += f"; not taken over by: {', '.join(waiting)}"
    yield "chunk size", told


def _cache(reply: admin.GetStatusResponse) -> Iterator[tuple[str, str]]:
    memory = reply.memory
    share = memory.used_bytes / memory.capacity_bytes if memory.capacity_bytes else 0
    used, capacity = units.format_size(memory.used_bytes), units.format_size(memory.capacity_bytes)
    told = f"{used} of {capacity} ({share:.0%}), policy {memory.policy}"
    for name, size in (("reserved", memory.reserved_bytes), ("quarantined", memory.quarantined_bytes)):
        if size:
            told += f", {units.format_size(size)} {name}"
    yield "memory", told
    yield "holds", f"{memory.chunks} chunks, {memory.objects} objects"
    if memory.pinned_chunks:
        yield "pinned", f"{memory.pinned_chunks} chunks, {units.format_size(memory.pinned_bytes)}"
    leases = reply.leases
    yield (
        "in use",
        f"{reply.sessions} sessions, {leases.lookup} lookup, {leases.read} read, {leases.write} write leases",
    )


def _traffic(reply: admin.GetStatusResponse) -> Iterator[tuple[str, str]]:
    counters = reply.counters
    told = f"{counters.lookups}"
    if counters.asked_tokens:
        share = counters.hit_tokens / counters.asked_tokens
        told += f", {share:.1%} of {counters.asked_tokens} tokens found{_origins(counters)}"
    yield "lookups", told
    for path in render.plain(counters)["paths"]:
        stored, read = units.format_size(path["stored_bytes"]), units.format_size(path["retrieved_bytes"])
        if path["stored_bytes"] or path["retrieved_bytes"]:
            yield f"moved by {path['path']}", f"{stored} stored, {read} retrieved"
    yield from _sharing(reply)
    if counters.evicted_chunks:
        yield "evicted", f"{counters.evicted_chunks} chunks, {units.format_size(counters.evicted_bytes)}"
    if counters.expired_leases:
        yield "expired", f"{counters.expired_leases} leases"


def _sharing(reply: admin.GetStatusResponse) -> Iterator[tuple[str, str]]:
    """Of a server that has asked, or given anything to, another."""
    sharing = reply.sharing
    if sharing.asked_chunks:
        told = f"{sharing.located_chunks} of {sharing.asked_chunks} chunks asked for are known elsewhere"
        told += f", {sharing.fetched_chunks} fetched, {sharing.fallback_chunks} not to be had"
        if sharing.directory_failures:
            told += f", {sharing.directory_failures} questions without an answer in time"
        yield "directory", told
    if sharing.given_leases:
        yield "given", f"{units.format_size(sharing.given_bytes)} to others, {sharing.given_leases} leases"


def _peer_row(peer: admin.PeerStatus) -> tuple[object, ...]:
    wrong = [(peer.failed_hints, "hints"), (peer.failed_transfers, "transfers")]
    return (
        peer.server_id,
        peer.address or "-",
        render.plain(peer)["path"] or "-",
        peer.fetched_chunks,
        units.format_size(peer.fetched_bytes),
        ", ".join(f"{count} {what}" for count, what in wrong if count) or "-",
        peer.problem or "-",
    )


def _origins(counters: admin.CacheCounters) -> str:
    """Where what was found came from, unless all of it was in memory."""
    below, elsewhere = counters.l2_hit_tokens, counters.peer_hit_tokens
    if not below and not elsewhere:
        return ""
    memory = counters.hit_tokens - below - elsewhere
    return f" ({memory} in memory, {below} in lower tiers, {elsewhere} at other servers)"


def _events(reply: admin.GetStatusResponse) -> Iterator[tuple[str, str]]:
    """Of a server that has somebody to tell."""
    if not reply.HasField("events"):
        return
    events = reply.events
    told = f"{events.closed_sequence} batches told"
    if events.held_batches:
        told += f", {events.held_batches} not arrived everywhere ({units.format_size(events.held_bytes)})"
    if events.dropped_batches:
        told += f", {events.dropped_batches} dropped before (a snapshot takes their place)"
    yield "events", told
    if events.kafka_topic:
        told = f"topic {events.kafka_topic}, {events.kafka_sequence} batches arrived"
        yield "kafka", f"{told}: {events.kafka_problem}" if events.kafka_problem else told


def _tier_row(tier: admin.TierStatus) -> tuple[object, ...]:
    wrong = [
        (tier.failed_writes, "not written"),
        (tier.failed_reads - tier.damaged_objects, "not read"),
        (tier.damaged_objects, "damaged"),
        (tier.skipped_objects, "skipped"),
    ]
    return (
        f"{tier.backend} {tier.location}",
        units.format_size(tier.used_bytes),
        units.format_size(tier.capacity_bytes),
        tier.chunks,
        f"{tier.store}, encrypted" if tier.encrypted else tier.store,
        tier.queued_objects,
        f"{tier.written_objects} ({units.format_size(tier.written_bytes)})",
        f"{tier.read_objects} ({units.format_size(tier.read_bytes)})",
        ", ".join(f"{count} {what}" for count, what in wrong if count > 0) or "-",
    )


def _problems(reply: admin.GetStatusResponse) -> Iterator[tuple[str, str]]:
    for tier in reply.tiers:
        if tier.problem:
            yield "PROBLEM", f"the lower tier {tier.backend!r} {tier.problem}"
    for task in reply.tasks:
        if not task.running and task.error:
            yield "PROBLEM", f"the task {task.name!r} died: {task.error}. Restart the server"


def _client_row(client: dict[str, object]) -> tuple[object, ...]:
    idle = client.get("idle")
    return (
        client["client_name"] or client["registration_id"],
        client["engine_id"],
        client["role"],
        client["kv_rank"],
        client["path"] or "-",
        client["path_reason"] or "-",
        "yes" if client["attached"] else "no",
        units.format_duration(idle) if isinstance(idle, float | int) else "-",
    )


def _link_row(link: admin.CoordinatorLink, reply: admin.GetStatusResponse) -> tuple[object, ...]:
    """Being a member and reporting are two facts."""
    silent = (
        "by kafka" if reply.events.kafka_topic else "do not arrive" if reply.HasField("events") else "off"
    )
    reports = "arrive" if link.reporting else silent
    answered = link.heartbeat_age.ToNanoseconds() / 1e9 if link.HasField("heartbeat_age") else None
    return (
        link.address,
        "yes" if link.registered else "no",
        reports,
        link.acknowledged_sequence if link.reporting else "-",
        "never" if answered is None else units.format_duration(answered),
        "; ".join(filter(None, (link.problem, link.sharing_problem))) or "-",
    )


def _refused_row(client: dict[str, object]) -> tuple[object, ...]:
    idle = client.get("idle")
    return (
        client["client_name"] or "-",
        client["reason"],
        client["times"],
        units.format_duration(idle) if isinstance(idle, float | int) else "-",
        client["message"],
    )


def _namespace_row(entry: dict[str, dict[str, object]]) -> tuple[object, ...]:
    namespace, layout = entry["namespace"], entry["layout"]
    groups = layout["groups"] if isinstance(layout["groups"], list) else []
    kinds = [f"{group['kind']} x{group['num_layers']}" for group in groups]
    return (
        namespace["model"],
        namespace["revision"] or "-",
        namespace["kv_dtype"] or "-",
        str(namespace["layout_fingerprint"])[:12] or "-",
        layout["world_size"],
        ", ".join(kinds),
        entry["registrations"],
    )
