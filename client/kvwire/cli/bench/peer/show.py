"""Tables for people, and the plot."""

from __future__ import annotations

from typing import Any, Final

from kvwire.cli import render, units
from kvwire.cli.bench.coordinator.show import check_plot

GOALS: Final = {
    "peer_vs_raw_socket": ">= 0.8",
    "peer_vs_memcpy": ">= 0.45",
    "ttft_peer_vs_recompute": "",
    "query_ttft_vs_without": "",
    "query_round_vs_without": "",
}


def table(found: dict[str, Any]) -> None:
    rows = [(name, f"{found[name]:.3f}", goal) for name, goal in GOALS.items() if found[name] is not None]
    rows += [(part, "-", why) for part, why in found["skipped"].items()]
    render.print_rows(("", "#measured", "goal"), rows)
    if "transfer" in found:
        _print_transfer(found["transfer"])
    if "engines" in found:
        _print_engines(found)
    _print_stale(found)
    if "restart" in found:
        _print_restart(found["restart"])


def _print_transfer(moved: dict[str, Any]) -> None:
    rows: list[tuple[Any, ...]] = []
    for path, sizes in moved["paths"].items():
        if "skipped" in sizes:
            rows.append((path, "-", "-", "-", "-", "-", "-", "-", sizes["skipped"]))
            continue
        for size, each in sizes.items():
            raw = [_number(each.get(name)) for name in ("fetch_vs_raw_socket", "raw_socket_gb_s")]
            speeds = [each[name] for name in ("fetch_gb_s", "fetch_at_once_gb_s", "memcpy_gb_s")]
            rows.append((path, each["arena"], size, each["fetch_vs_memcpy"], raw[0], *speeds, raw[1]))
    columns = (
        "path",
        "arena",
        "#size",
        "#vs memcpy",
        "#vs raw socket",
        "#GB/s",
        "#at once",
        "#memcpy",
        "#raw socket",
    )
    render.print_rows(
        columns, rows, title="\nfetched by one server out of another's memory, every byte compared"
    )
    signs = moved["heartbeats"]
    render.print_rows(
        (f"life signs, every {signs['interval_ms']} ms", "#count", "#late by p50 ms", "#p99", "#max"),
        [
            (name.replace("_", " "), *(signs[name][mark] for mark in ("count", "p50_ms", "p99_ms", "max_ms")))
            for name in ("idle", "during_transfers")
        ],
        title="\n",
    )


def _print_engines(found: dict[str, Any]) -> None:
    first, rounds = found["engines"], found["experiment"]
    title = f"\n{found['model']}, prompts of {first['prompt_tokens']:,} tokens, one at a time"
    render.print_rows(("time to first token", "#median ms"), list(first["ttft_ms"].items()), title=title)
    title = (
        f"\n{rounds['contexts']} contexts of {rounds['context_tokens']:,} tokens that the other engine has, "
        f"{rounds['in_flight']} questions at once"
    )
    render.print_rows(
        ("query round", "#mean first token s", "#longest s", "#round s"),
        [(name.replace("_", " "), *rounds[name].values()) for name in ("with_peers", "without_peers")],
        title=title,
    )


def _print_stale(found: dict[str, Any]) -> None:
    for name, title in (("stale_lookups", "lookup"), ("stale_ttft", "first token")):
        if name not in found:
            continue
        shares = found[name]["shares"] if name == "stale_lookups" else found[name]
        render.print_rows(
            (
                "#stale",
                "#prompts",
                f"#{title} mean ms",
                "#p99",
                "#fetched",
                "#failed hints",
                "#computed instead",
            ),
            [
                (
                    f"{each['stale_share']:.0%}",
                    each["prompts"],
                    each["mean_ms"],
                    each["p99_ms"],
                    units.format_size(each["fetched_bytes"]),
                    each["failed_hints"],
                    each["fallback_chunks"],
                )
                for each in shares
            ],
            title="\n",
        )


def _print_restart(told: dict[str, Any]) -> None:
    meanwhile = told["lookup_meanwhile_ms"]
    rows = [
        ("restarted: a member again", told["registered_ms"]),
        ("its old placements are gone", told["clean_ms"]),
        (f"not restarted, expiry after {told['expire_after_s']:.0f} s", told["expired_ms"]),
        (f"longest of {told['lookups_meanwhile']} lookups meanwhile", meanwhile["max"]),
    ]
    title = f"\na server with {told['placements']:,} placements is killed"
    render.print_rows(("", "#ms"), rows, title=title)


def _number(value: float | None) -> str:
    return "-" if value is None else str(value)


def plot(found: dict[str, Any], file: str) -> None:
    """What was measured of: speed, query rounds, staleness, life signs."""
    check_plot()
    from matplotlib import pyplot as plt

    drawn = [
        (each, found)
        for name, each in (
            ("transfer", _plot_transfer),
            ("experiment", _plot_experiment),
            ("stale_ttft", _plot_first_tokens),
            ("stale_lookups", _plot_lookups),
            ("transfer", _plot_heartbeats),
            ("restart", _plot_restart),
        )
        if name in found
    ]
    rows = max(1, -(-len(drawn) // 2))
    figure, grid = plt.subplots(rows, 2, figsize=(10, 3.5 * rows), squeeze=False)
    for axes in grid.flat[len(drawn) :]:
        axes.set_axis_off()
    for axes, (draw, what) in zip(grid.flat, drawn, strict=False):
        draw(axes, what)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.title.set_fontsize(10)
    figure.tight_layout()
    figure.savefig(file, dpi=100)
    plt.close(figure)


def _plot_transfer(axes: Any, found: dict[str, Any]) -> None:
    measured = [
        (f"{path}\n{size}", each)
        for path, sizes in found["transfer"]["paths"].items()
        if "skipped" not in sizes
        for size, each in sizes.items()
    ]
    for offset, name, label in ((-0.2, "fetch", "fetched from a peer"), (0.2, "raw_socket", "raw socket")):
        bars = [(place + offset, each.get(f"{name}_gb_s")) for place, (_, each) in enumerate(measured)]
        some = [bar for bar in bars if bar[1] is not None]
        axes.bar([place for place, _ in some], [speed for _, speed in some], 0.36, label=label)
    for place, (_, each) in enumerate(measured):
        axes.hlines(each["memcpy_gb_s"], place - 0.4, place + 0.4, color="gray", linestyle=":")
    axes.plot([], [], color="gray", linestyle=":", label="memcpy")
    axes.set_xticks(range(len(measured)), [label for label, _ in measured], fontsize=8)
    axes.set(ylabel="GB/s", ylim=(0, 1.4 * max(each["memcpy_gb_s"] for _, each in measured)))
    axes.set_title("From one server's memory into another's")
    axes.legend(fontsize=8, ncol=3, loc="upper left")


def _plot_experiment(axes: Any, found: dict[str, Any]) -> None:
    rounds = found["experiment"]
    for offset, name in ((-0.2, "with_peers"), (0.2, "without_peers")):
        values = [rounds[name][mark] for mark in ("mean_ttft_s", "round_s")]
        bars = axes.bar([0 + offset, 1 + offset], values, 0.36, label=name.replace("_", " "))
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_xticks((0, 1), ("mean time to first token", "round"))
    axes.set(ylabel="s")
    axes.set_title(f"{rounds['contexts']} contexts warmed at one engine, asked at another")
    axes.legend(fontsize=8)


def _plot_first_tokens(axes: Any, found: dict[str, Any]) -> None:
    _plot_shares(axes, found["stale_ttft"], "time to first token, ms")
    recomputed = found["engines"]["ttft_ms"]["recomputed"]
    axes.axhline(recomputed, color="gray", linestyle=":", label="computed without peers")
    axes.set(ylim=(0, None))
    axes.set_title("Stale placements: time to first token")
    axes.legend(fontsize=8)


def _plot_lookups(axes: Any, found: dict[str, Any]) -> None:
    _plot_shares(axes, found["stale_lookups"]["shares"], "lookup, ms")
    nowhere = found["stale_lookups"]["nowhere_ms"]["mean_ms"]
    axes.axhline(nowhere, color="gray", linestyle=":", label="nobody has it, mean")
    axes.set(ylim=(0, None))
    axes.set_title("Stale placements: lookups")
    axes.legend(fontsize=8)


def _plot_shares(axes: Any, shares: list[dict[str, Any]], label: str) -> None:
    stale = [100 * each["stale_share"] for each in shares]
    for mark, name in (("mean_ms", "mean"), ("p99_ms", "P99")):
        axes.plot(stale, [each[mark] for each in shares], "o-", label=name)
    axes.set(xlabel="stale placements, %", ylabel=label)


def _plot_heartbeats(axes: Any, found: dict[str, Any]) -> None:
    signs = found["transfer"]["heartbeats"]
    for name, label in (("idle", "at rest"), ("during", "while bytes move")):
        samples = signs[f"{name}_samples_ms"]
        shares = [(position + 1) / len(samples) for position in range(len(samples))]
        axes.plot([max(each, 0.01) for each in samples], shares, label=label, drawstyle="steps-post")
    axes.set(xscale="log", ylim=(0, 1.02), xlabel="life sign late by, ms", ylabel="share of life signs")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_title("Life signs of both servers")
    axes.legend(fontsize=8, loc="lower right")


def _plot_restart(axes: Any, found: dict[str, Any]) -> None:
    told = found["restart"]
    bars = {
        "longest lookup\nmeanwhile": told["lookup_meanwhile_ms"]["max"],
        f"not restarted, expiry\nafter {told['expire_after_s']:.0f} s": told["expired_ms"],
        "restarted: clean": told["clean_ms"],
        "restarted: a member": told["registered_ms"],
    }
    drawn = axes.barh(range(len(bars)), list(bars.values()), height=0.6)
    axes.bar_label(drawn, fmt="%.0f", fontsize=8, padding=3)
    axes.set_yticks(range(len(bars)), list(bars), fontsize=8)
    axes.set(xlabel="ms", xlim=(0, 1.15 * max(bars.values())))
    axes.set_title(f"A server with {told['placements']:,} placements is killed")
