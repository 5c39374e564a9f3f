"""`kvwire ping`."""

from __future__ import annotations

import time
from typing import Annotated

from cyclopts import Parameter

from kvwire.cli import render, units
from kvwire.cli.connect import ClientSettings, open_client
from kvwire.cli.flags import command_app, with_settings
from kvwire.errors import InvalidArgument

TEXT = """Is a server there, and how fast does it answer?

  kvwire ping --address unix:/run/kvwire.sock
  kvwire ping --address cache-1:7470 --count 100 -o json

A ping is answered at once, also while lookups queue. The first one includes connecting."""

command = command_app("ping", TEXT)


@command.default
@with_settings(ClientSettings, "client")
def ping(
    settings: ClientSettings,
    *,
    count: Annotated[int, Parameter(name=("--count", "-n"), help="How many pings to send.")] = 4,
    output: render.Output = "table",
) -> int:
    if count < 1:
        raise InvalidArgument("--count", "is at least 1")
    seconds, pongs = [], []
    with open_client(settings, "ping") as client:
        for _ in range(count):
            started = time.perf_counter()
            pongs.append(client.ping(timeout=settings.deadline))
            seconds.append(time.perf_counter() - started)
    pong = pongs[-1]
    warm = sorted(seconds[1:] or seconds)
    found = {
        "address": settings.address,
        "incarnation": pong.incarnation,
        "chunk_size": pong.chunk_size,
        "draining": pong.draining,
        "pings": count,
        "first_us": round(seconds[0] * 1e6),
        "p50_us": round(warm[len(warm) // 2] * 1e6),
        "max_us": round(warm[-1] * 1e6),
    }
    if output == "json":
        render.print_json(found)
        return 0
    size = f"{pong.chunk_size} tokens" if pong.chunk_size else "not negotiated yet"
    render.print_fields(
        [
            ("server", f"{settings.address} is {'draining' if pong.draining else 'there'}"),
            ("incarnation", pong.incarnation.hex()),
            ("chunk size", size),
            ("first ping", units.format_duration(seconds[0])),
            ("then", f"{units.format_duration(warm[len(warm) // 2])} (p50 of {len(warm)})"),
        ]
    )
    return 0
