"""`kvwire bench control` and `kvwire bench transfer`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from kvwire.cli import render
from kvwire.cli.bench import report
from kvwire.cli.flags import command_app

TEXT = """Measure calls against a bare gRPC echo, and data paths against memcpy.

Each benchmark starts its own server process and its own yardstick, and reports ratios of one run: absolute
times are noise on a machine that does other work.

  kvwire bench control
  kvwire bench transfer --path shm --json"""
CONTROL_TEXT = """Ping and lookups against a bare grpc.aio echo of 64 bytes, over a socket file.

  kvwire bench control
  kvwire bench control --quick --json

Reported per operation: its p50 over the p50 of the echoes around it. Lookups send tokens, are leased, and
come in sessions that the server has not seen, so it hashes every prompt; the worse of hit and miss counts.
Callers are processes; they end their sessions in batches, within the measured time."""

command = command_app("bench", TEXT)
control_app = command_app("control", CONTROL_TEXT)
command.command(control_app)

Json = Annotated[bool, Parameter(help="Print one JSON object, for programs.", negative=())]
Quick = Annotated[bool, Parameter(help="A few seconds: to see that it runs, not to compare.", negative=())]


@control_app.default
def control(*, json: Json = False, quick: Quick = False) -> int:
    from kvwire.cli.bench import control as bench

    with report.progress("kvwire bench control") as tell:
        found = bench.run(bench.QUICK if quick else bench.Plan(), tell)
    if json:
        render.print_json(found)
    else:
        report.print_control(found)
    return 0
