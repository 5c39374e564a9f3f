"""Tables for people, and the plot."""

from __future__ import annotations

from typing import Any, Final

from kvwire.cli import render
from kvwire.errors import ConfigError

GOALS: Final = {
    "ingest_per_s": ">= 300,000",
    "ingest_with_tokens_per_s": ">= 100,000",
    "locate_131072_vs_echo": "<= 8",
    "bytes_per_key": "<= 300",
    "fence_max_heartbeat_ms": "<= 250",
    "fence_max_lookup_ms": "<= 250",
    "visible_ms": "<= 100",
}


def table(found: dict[str, Any]) -> None:
    rows = [(name, _number(found[name]), goal) for name, goal in GOALS.items() if found[name] is not None]
    at = f"{found['compared_at_keys']:,} keys, {found['fenced_placements']:,} fenced"
    render.print_rows(("", "#measured", "#goal"), rows, title=at)
    _print_ingest(found["ingest"])
    _print_sizes(found["directory"]["sizes"])
    healed = found["recovery"]
    render.print_rows(
        ("time to whole", "#median ms", "#max ms"),
        [(name, each["median"], each["max"]) for name, each in healed["whole_ms"].items()],
        title="\n",
    )
    render.print_rows(
        ("events late by ms", "#evicted per s", "#hints", "#failed hints", "#held, not told"),
        [
            (
                each["event_delay_ms"],
                f"{each['evicted_per_s']:.1%}",
                each["hints"],
                f"{each['failed_hints']:.2%}",
                f"{each['held_untold']:.2%}",
            )
            for each in found["staleness"]["cells"]
        ],
        title="\n",
    )


def _print_ingest(taken: dict[str, Any]) -> None:
    render.print_rows(
        (
            "ingest",
            "#entries/s",
            "#time ÷ parsing",
            "limited by",
            "#heartbeat p50 ms",
            "#p99",
            "#max",
        ),
        [
            (
                name,
                _number(each["per_s"]),
                each["vs_parse"],
                each["limited_by"],
                *each["heartbeat_busy"].values(),
            )
            for name, each in taken.items()
        ],
        title="\n",
    )


def _print_sizes(sizes: list[dict[str, Any]]) -> None:
    names = list(sizes[0]["lookups"])
    columns = (name.replace("_", " ") for name in names)
    render.print_rows(
        ("#keys", "#bytes/key", *(f"#{name} p50 ms (÷ echo)" for name in columns)),
        [
            (
                _number(each["keys"]),
                each["bytes_per_key"],
                *(f"{each['lookups'][n]['p50_ms']} ({each['lookups'][n]['vs_echo']})" for n in names),
            )
            for each in sizes
        ],
        title="\n",
    )


def _number(value: float) -> str:
    return f"{value:,}"


def check_plot() -> None:
    """Before a long run, and not after it. Raises ConfigError."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib", setting="plot") from error
    mpl.use("Agg")


def plot(found: dict[str, Any], file: str) -> None:
    check_plot()
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7))
    _plot_lookups(axes[0][0], found["directory"]["sizes"])
    _plot_stale(axes[0][1], found["staleness"]["cells"])
    _plot_heartbeats(axes[1][0], found["ingest"])
    _plot_healed(axes[1][1], found["recovery"]["whole_ms"])
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)
        each.set_axisbelow(True)
        each.grid(alpha=0.25, linewidth=0.6)
        each.title.set_fontsize(10)
    figure.tight_layout()
    figure.savefig(file, dpi=100)
    plt.close(figure)


def _plot_lookups(axes: Any, sizes: list[dict[str, Any]]) -> None:
    names = {
        "tokens_131072": "131,072 tokens, all found",
        "tokens_131072_miss": "131,072 tokens, none found",
        "keys_512": "512 keys",
        "keys_1": "1 key",
    }
    keys = [each["keys"] for each in sizes]
    for name, label in names.items():
        axes.plot(keys, [each["lookups"][name]["vs_echo"] for each in sizes], "o-", label=label)
    axes.axhline(8, color="gray", linestyle=":", linewidth=1)
    axes.annotate("goal", (keys[0], 8), textcoords="offset points", xytext=(0, 3), fontsize=8, color="gray")
    axes.set(xscale="log", ylim=(0, 12), xlabel="keys in the directory", ylabel="p50 ÷ bare echo")
    axes.set_title("LocateChunks")
    axes.legend(fontsize=8, ncol=2, loc="upper center")


def _plot_stale(axes: Any, cells: list[dict[str, Any]]) -> None:
    for churn in dict.fromkeys(each["eviction_rate"] for each in cells):
        row = [each for each in cells if each["eviction_rate"] == churn]
        delays = [each["event_delay_ms"] for each in row]
        axes.plot(delays, [100 * each["failed_hints"] for each in row], "o-", label=f"{churn:.0%} per s")
    axes.set_xscale("symlog", linthresh=10)
    axes.set_yscale("symlog", linthresh=0.1)
    ticks = sorted({each["event_delay_ms"] for each in cells})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    marks = (0, 0.1, 1, 10, 100)
    axes.set_yticks(marks, [str(mark) for mark in marks])
    axes.set(ylim=(0, 100), xlabel="events late by, ms", ylabel="hints that fail at the owner, %")
    axes.set_title("Staleness, by the share of the cache that is evicted")
    axes.legend(fontsize=8)


def _plot_heartbeats(axes: Any, taken: dict[str, Any]) -> None:
    curves = [(name, "busy", f"ingest, {name}") for name in taken] + [("plain", "idle", "idle")]
    for name, state, label in curves:
        samples = taken[name][f"heartbeat_{state}_samples_ms"]
        shares = [(position + 1) / len(samples) for position in range(len(samples))]
        axes.plot(samples, shares, label=label, drawstyle="steps-post")
    axes.set(xscale="log", ylim=(0, 1.02), xlabel="heartbeat takes, ms", ylabel="share of heartbeats")
    axes.set_title("Heartbeats while events come in at full speed")
    axes.legend(fontsize=8, loc="lower right")


def _plot_healed(axes: Any, faults: dict[str, dict[str, float]]) -> None:
    names = list(faults)[::-1]
    values = [faults[name]["median"] for name in names]
    axes.barh(range(len(names)), values, height=0.6)
    axes.set_yticks(range(len(names)), [name.replace(", ", ",\n") for name in names], fontsize=8)
    for place, value in enumerate(values):
        axes.annotate(f"{value:,.0f}", (value, place), textcoords="offset points", xytext=(4, -3), fontsize=8)
    axes.set(xscale="log", xlabel="ms", xlim=(1, max(values) * 3))
    axes.set_title("Fault until the directory is whole")
