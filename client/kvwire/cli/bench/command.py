"""`kvwire bench control` and `kvwire bench transfer`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from cyclopts import Parameter

from kvwire.cli import render, units
from kvwire.cli.bench import report
from kvwire.cli.flags import command_app
from kvwire.errors import ConfigError

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

TRANSFER_TEXT = """Store and retrieve of paged KV over each data path, against memcpy and shared memory.

  kvwire bench transfer
  kvwire bench transfer --path shm --size 64MiB --json
  kvwire bench transfer --plot paths.png

The layout is Llama-3-8B's: 32 layers, blocks of 16 tokens and 64 KiB per layer, chunks of 256 tokens, in
shuffled blocks of one process. What is measured is what a user gets from kvwire.client; every byte that
comes back is compared. The path ucx-remote runs over TCP on loopback and is also compared with a raw
socket. At 1 GiB it takes about 4 GiB of memory."""

command = command_app("bench", TEXT)
control_app = command_app("control", CONTROL_TEXT)
transfer_app = command_app("transfer", TRANSFER_TEXT)
command.command(control_app)
command.command(transfer_app)

SEVERAL: dict[str, Any] = {"negative_iterable": (), "show_default": False}
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


@transfer_app.default
def transfer(
    *,
    path: Annotated[
        tuple[str, ...], Parameter(help="Paths to measure: shm, ucx-local, ucx-remote, inline.", **SEVERAL)
    ] = (),
    size: Annotated[tuple[str, ...], Parameter(help="Sizes to move, multiples of 32MiB.", **SEVERAL)] = (),
    rounds: Annotated[int, Parameter(help="Counted rounds. 0: by size.")] = 0,
    memory: Annotated[
        Literal["auto", "torch", "numpy"], Parameter(help="What holds the blocks. auto: torch if installed.")
    ] = "auto",
    copy_threads: Annotated[
        int, Parameter(help="Threads of one copy. 0: as the client library chooses.")
    ] = 0,
    plot: Annotated[
        str, Parameter(help="Write a chart to this file; needs matplotlib.", show_default=False)
    ] = "",
    json: Json = False,
    quick: Quick = False,
) -> int:
    from kvwire.cli.bench import transfer as bench

    plan = bench.Plan(
        paths=path or tuple(bench.PATHS),
        sizes=[parsed_size(text) for text in size] or (bench.SIZES[:1] if quick else bench.SIZES),
        rounds=rounds or (2 if quick else 0),
        warmup=1 if quick else 3,
        memory=memory,
        copy_threads=copy_threads,
    )
    with report.progress("kvwire bench transfer") as tell:
        found = bench.run(plan, tell)
    if plot:
        report.plot_transfer(found, plot)
    if json:
        render.print_json(found)
    else:
        report.print_transfer(found)
    return 0


def parsed_size(text: str) -> int:
    try:
        return units.parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--size {text!r} {error}.", setting="size") from error
