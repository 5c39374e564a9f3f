"""`kvwire bench control | transfer | engine | coordinator | peer | tier`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  cyclopts evaluates the annotations
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from kvwire.cli import render, units
from kvwire.cli.bench import report
from kvwire.cli.flags import command_app
from kvwire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.cli.bench.engine_lmcache import LmCache

TEXT = """Measure calls against a bare gRPC echo, data paths against memcpy, engines with and without kvwire.

Each benchmark starts its own server process and its own yardstick, and reports ratios of one run: absolute
times are noise on a machine that does other work.

  kvwire bench control
  kvwire bench transfer --path shm --json
  kvwire bench engine --with-lmcache
  kvwire bench coordinator --quick
  kvwire bench peer --part transfer
  kvwire bench tier --json"""
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

ENGINE_TEXT = """Real vLLM engines with kvwire, without a connector, and with LMCache's.

  kvwire bench engine
  kvwire bench engine --with-lmcache --json
  kvwire bench engine --model llama --overlap
  kvwire bench engine --model tiny --quick

Reported: the time to the first token of a prompt whose chunks are cached over the time without kvwire, and
over the time with LMCache's connector; engine steps per second while kvwire has nothing to do over those of
an engine without it. All engines live at once and take turns, each ratio is of one round, and the medians
count. The models: gemma, the demo's Gemma 3 270M (two KV groups); llama and tiny, which have random weights;
or a folder. float32, on a CPU. LMCache runs in an environment of its own and is left out without one."""

COORDINATOR_TEXT = """A coordinator under simulated cache servers: rates, lookups, memory, faults, staleness.

  kvwire bench coordinator --quick
  kvwire bench coordinator --json --plot coordinator.png

The simulated servers register, give life signs, report events and answer for snapshots as real ones do. With
two cores the coordinator has one for itself. Measured: entries taken in per second, with and without token
ids, beside parsing the same bytes; LocateChunks and memory by the number of keys, beside a bare grpc.aio echo
of 64 bytes; what heartbeats and lookups wait for while events come in and while a server's placements are
fenced; the time from a fault until the directory is whole; how often a hint fails at its owner. In full it
takes two minutes and 3 GiB of memory, with --quick half a minute."""

PEER_TEXT = """Servers that get KV from each other: speed, engines, stale hints, a killed server.

  kvwire bench peer
  kvwire bench peer --part transfer --size 64MiB --json
  kvwire bench peer --part engines --model llama
  kvwire bench peer --plot peers.png

The parts. transfer: what a lookup brings from another server's memory over UCX, against memcpy (ucx-local)
and a raw socket (ucx-remote, TCP on loopback), every byte compared; how late life signs are meanwhile.
engines: the time to the first token of what another engine has computed, and a round of questions on contexts
that another engine has, with and without peers; real vLLM, as in bench engine. stale: the same, and lookups,
while 0, 10 and 50 % of the directory's placements are not true. restart: until nothing is told of a killed
server. In full it takes some minutes and 8 GiB of memory, with --quick about one minute."""

TIER_TEXT = """What a server writes below its memory and brings back, against copying files of the same bytes.

  kvwire bench tier
  kvwire bench tier --folder /mnt/nvme --size 1GiB --json
  kvwire bench tier --url 's3://bucket/bench?size=10GiB' --url 'redis://host:6379?size=10GiB'
  kvwire bench tier --key-file key

A client stores a prompt, the server writes it to the tier, its memory is cleared, a lookup brings it back;
every byte is compared. The yardstick copies the same bytes file to file on the same file system, one thread,
before and after. All files are in the page cache and nothing is synced on either side: it is the software
that is compared, not a disk. A write counts from its first byte to its last: the server begins when no client
has moved bytes for a quarter of a second. Other stores (--url, as in --l2, credentials from the environment)
are compared with the same file copies."""

command = command_app("bench", TEXT)
control_app = command_app("control", CONTROL_TEXT)
transfer_app = command_app("transfer", TRANSFER_TEXT)
command.command(control_app)
command.command(transfer_app)
engine_app = command_app("engine", ENGINE_TEXT)
command.command(engine_app)
coordinator_app = command_app("coordinator", COORDINATOR_TEXT)
command.command(coordinator_app)
peer_app = command_app("peer", PEER_TEXT)
command.command(peer_app)
tier_app = command_app("tier", TIER_TEXT)
command.command(tier_app)

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


@engine_app.default
def engine(
    *,
    model: Annotated[str, Parameter(help="gemma, llama, tiny, or a model's folder.")] = "gemma",
    prompt_tokens: Annotated[int, Parameter(help="Length of the reused prompt.")] = 1000,
    chunk_size: Annotated[int, Parameter(help="Tokens of a chunk, in every cache.")] = 64,
    path: Annotated[
        Literal["auto", "shm", "ucx", "inline"], Parameter(help="How kvwire's bytes move.")
    ] = "auto",
    trials: Annotated[int, Parameter(help="How often all is started anew. 0: 3, or 1 with --quick.")] = 0,
    rounds: Annotated[int, Parameter(help="Rounds of each trial. 0: 4, or 2 with --quick.")] = 0,
    threads: Annotated[int, Parameter(help="Threads of each engine's kernels.")] = 1,
    overlap: Annotated[
        bool, Parameter(help="Also measure kvwire.overlap, layer by layer.", negative=())
    ] = False,
    lmcache_python: Annotated[
        Path | None,
        Parameter(help="Interpreter of an environment with vLLM and LMCache.", show_default=False),
    ] = None,
    with_lmcache: Annotated[
        bool, Parameter(help="Set such an environment up in the cache folder, and use it.", negative=())
    ] = False,
    json: Json = False,
    quick: Quick = False,
) -> int:
    from kvwire.cli.bench import engine as bench

    with report.progress("kvwire bench engine") as tell:
        lmcache, why_not = neighbour(lmcache_python, with_lmcache, tell)
        plan = bench.Plan(
            model=model,
            prompt_tokens=prompt_tokens,
            chunk_size=chunk_size,
            path=path,
            trials=trials or (1 if quick else 3),
            rounds=rounds or (2 if quick else 4),
            threads=threads,
            overlap=overlap,
            lmcache=lmcache,
            no_lmcache=why_not,
        )
        found = bench.run(plan, tell)
    if json:
        render.print_json(found)
    else:
        report.print_engine(found)
    return 0


@coordinator_app.default
def coordinator(
    *,
    plot: Annotated[
        str, Parameter(help="Write a chart to this file; needs matplotlib.", show_default=False)
    ] = "",
    json: Json = False,
    quick: Quick = False,
) -> int:
    from kvwire.cli.bench.coordinator import plan, run, show

    if plot:
        show.check_plot()
    with report.progress("kvwire bench coordinator") as tell:
        found = run.run(plan.QUICK if quick else plan.Plan(), tell)
    if plot:
        show.plot(found, plot)
    if json:
        render.print_json(found)
    else:
        show.table(found)
    return 0


@peer_app.default
def peer(
    *,
    part: Annotated[
        tuple[str, ...], Parameter(help="What to measure: transfer, engines, stale, restart.", **SEVERAL)
    ] = (),
    path: Annotated[
        tuple[str, ...], Parameter(help="Paths between servers: ucx-remote, ucx-local.", **SEVERAL)
    ] = (),
    size: Annotated[tuple[str, ...], Parameter(help="Sizes to move, multiples of 32MiB.", **SEVERAL)] = (),
    arena: Annotated[
        str,
        Parameter(
            help="Of the servers: shm, private (huge pages, clients come over UCX, too), "
            "or auto: private for ucx-local."
        ),
    ] = "auto",
    rounds: Annotated[int, Parameter(help="Counted rounds of each transfer. 0: by size.")] = 0,
    model: Annotated[
        str, Parameter(help="gemma, llama, tiny, or a folder. Default: gemma.", show_default=False)
    ] = "",
    prompt_tokens: Annotated[
        int, Parameter(help="Length of a prompt. Default: 1000.", show_default=False)
    ] = 0,
    plot: Annotated[
        str, Parameter(help="Write a chart to this file; needs matplotlib.", show_default=False)
    ] = "",
    json: Json = False,
    quick: Quick = False,
) -> int:
    from dataclasses import replace

    from kvwire.cli.bench.coordinator.show import check_plot
    from kvwire.cli.bench.peer import plan as plans
    from kvwire.cli.bench.peer import run, show

    if plot:
        check_plot()
    plan = plans.QUICK if quick else plans.Plan()
    plan = replace(
        plan,
        parts=part or plan.parts,
        paths=path or plan.paths,
        sizes=tuple(parsed_size(text) for text in size) or plan.sizes,
        arena=arena,
        rounds=rounds or plan.rounds,
        model=model or plan.model,
        prompt_tokens=prompt_tokens or plan.prompt_tokens,
    )
    with report.progress("kvwire bench peer") as tell:
        found = run.run(plan, tell)
    if plot:
        show.plot(found, plot)
    if json:
        render.print_json(found)
    else:
        show.table(found)
    return 0


@tier_app.default
def tier(
    *,
    folder: Annotated[
        str, Parameter(help="Where the files lie. Default: the temporary folder.", show_default=False)
    ] = "",
    url: Annotated[tuple[str, ...], Parameter(help="More stores, as in --l2.", **SEVERAL)] = (),
    size: Annotated[tuple[str, ...], Parameter(help="Sizes to move, multiples of 32MiB.", **SEVERAL)] = (),
    rounds: Annotated[int, Parameter(help="Counted rounds. 0: by size.")] = 0,
    key_file: Annotated[
        str, Parameter(help="Encrypt at rest, as --l2-key-file does.", show_default=False)
    ] = "",
    json: Json = False,
    quick: Quick = False,
) -> int:
    from kvwire.cli.bench import tier as bench

    plan = bench.Plan(
        sizes=[parsed_size(text) for text in size] or (bench.SIZES[:1] if quick else bench.SIZES),
        urls=url,
        folder=folder,
        key_file=key_file,
        rounds=rounds or (2 if quick else 0),
        warmup=1 if quick else 2,
    )
    with report.progress("kvwire bench tier") as tell:
        found = bench.run(plan, tell)
    if json:
        render.print_json(found)
    else:
        report.print_tier(found)
    return 0


def neighbour(python: Path | None, make: bool, tell: Callable[[str], None]) -> tuple[LmCache | None, str]:
    """LMCache, or why it is left out. What was asked for by its place must be there."""
    from kvwire.cli.bench import engine_lmcache

    if python is not None:
        return engine_lmcache.LmCache.at(python), ""
    if not make:
        return None, "no environment with LMCache was named; --with-lmcache makes one"
    try:
        return engine_lmcache.set_up(tell), ""
    except ConfigError as error:
        return None, str(error)


def parsed_size(text: str) -> int:
    try:
        return units.parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--size {text!r} {error}.", setting="size") from error
