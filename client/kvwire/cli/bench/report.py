"""What a benchmark shows while it runs (stderr) and when it is done (stdout)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from kvwire.cli import render
from kvwire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is being done; without a terminal, a line for each."""
    console = render.console(stderr=True)
    if not console.is_terminal:
        yield lambda text: console.print(f"{title}: {text}")
        return
    with console.status(f"{title}: starting") as status:
        yield lambda text: status.update(f"{title}: {text}")


def print_control(found: dict[str, Any]) -> None:
    rows = [("echo of 64 bytes", found["echo_p50_us"], found["echo_p99_us"], "1")]
    rows += [
        (name.replace("_", " "), call["p50_us"], call["p99_us"], f"{call['vs_echo']:.2f}")
        for name, call in found["calls"].items()
    ]
    render.print_rows(("one caller", "#p50 us", "#p99 us", "#vs echo"), rows)
    callers = found["callers"]
    render.print_rows(
        (f"{callers['processes']} callers", "#calls/s", "#vs echo"),
        [
            ("echo of 64 bytes", callers["echo_per_s"], "1"),
            ("lookup 8192 hit", callers["hit_per_s"], f"{callers['hit_vs_echo']:.2f}"),
            ("lookup 8192 miss", callers["miss_per_s"], f"{callers['miss_vs_echo']:.2f}"),
        ],
        title="\n",
    )


def print_transfer(found: dict[str, Any]) -> None:
    rows = []
    for path, sizes in found["paths"].items():
        if "skipped" in sizes:
            rows.append((path, "-", "-", "-", "-", "-", "-", "-", sizes["skipped"]))
            continue
        for size, each in sizes.items():
            raw = f"{each['vs_raw_socket']:.2f}" if "vs_raw_socket" in each else "-"
            ratios = [f"{each[name]:.2f}" for name in ("store_vs_memcpy", "retrieve_vs_memcpy")]
            speeds = [each[name] for name in ("store_gb_s", "retrieve_gb_s", "memcpy_gb_s")]
            rows.append((path, size, *ratios, raw, *speeds, "every byte compared"))
    columns = ("path", "#size", "#store vs memcpy", "#retrieve vs memcpy", "#vs raw socket")
    render.print_rows((*columns, "#store GB/s", "#retrieve GB/s", "#memcpy GB/s", ""), rows)


def print_tier(found: dict[str, Any]) -> None:
    rows = []
    for store, sizes in found["stores"].items():
        for size, each in sizes.items():
            ratios = [f"{each[name]:.2f}" for name in ("write_vs_file_copy", "read_vs_file_copy")]
            speeds = [each[name] for name in ("write_gb_s", "read_gb_s", "file_copy_gb_s")]
            rows.append((store, size, *ratios, *speeds, "every byte compared"))
    columns = ("store", "#size", "#write vs file copy", "#read vs file copy")
    title = "encrypted at rest" if found["encrypted"] else ""
    render.print_rows((*columns, "#write GB/s", "#read GB/s", "#file copy GB/s", ""), rows, title=title)


def print_engine(found: dict[str, Any]) -> None:
    base, reused = found["ttft_ms"]["without"], found["reused_tokens"]
    rows = [
        (name, reused[name], ms, f"{ms / base:.2f}", found["steps_per_s"][name])
        for name, ms in found["ttft_ms"].items()
    ]
    title = f"{found['model']}, a prompt of {found['prompt_tokens']:,} tokens, medians"
    columns = ("engine", "#tokens reused", "#first token ms", "#vs without", "#idle steps/s")
    render.print_rows(columns, rows, title=title)
    ratios = [
        (name.replace("_", " "), f"{value:.3f}" if value is not None else f"- ({found['skipped'][name]})")
        for name, value in found.items()
        if "_vs_" in name
    ]
    render.print_rows(("median ratio of a round", ""), ratios, title="\n")


def plot_transfer(found: dict[str, Any], file: str) -> None:
    """Bars of GB/s by path and size."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib", setting="plot") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    measured = [
        (f"{path}\n{size}", each)
        for path, sizes in found["paths"].items()
        if "skipped" not in sizes
        for size, each in sizes.items()
    ]
    figure, axes = plt.subplots(figsize=(max(6, 1.6 * len(measured)), 4.5))
    for offset, name in ((-0.27, "memcpy"), (0, "store"), (0.27, "retrieve")):
        places = [place + offset for place in range(len(measured))]
        axes.bar(places, [each[f"{name}_gb_s"] for _label, each in measured], 0.25, label=name)
    axes.set_xticks(range(len(measured)), [label for label, _each in measured])
    axes.set_ylabel("GB/s")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)
