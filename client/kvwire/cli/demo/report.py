"""The demo's outcome, as a table or as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from kvwire.cli.units import format_duration, format_size

if TYPE_CHECKING:
    from kvwire.cli.demo.scenario import Outcome, Shared


def as_json(outcome: Outcome) -> str:
    found = {
        "model": outcome.model,
        "document": outcome.document,
        "path": outcome.path,
        "prompt_tokens": outcome.b.prompt_tokens,
        "tokens_from_kvwire": outcome.b.cached_tokens,
        "time_to_first_token_s": {
            "a": outcome.a.first_token_s,
            "b": outcome.b.first_token_s,
            "b_without_kvwire": outcome.plain.first_token_s,
        },
        **between_servers(outcome.shared),
        "stored_bytes": outcome.traffic.stored,
        "retrieved_bytes": outcome.traffic.retrieved,
        "text": outcome.b.text,
        "output_identical": outcome.identical,
        "held": not outcome.problems,
        "problems": outcome.problems,
    }
    return json.dumps(found, indent=2)


def between_servers(shared: Shared | None) -> dict[str, object]:
    return {"tokens_from_peer": shared.tokens, "peer_bytes": shared.moved} if shared else {}


def print_table(outcome: Outcome) -> None:
    console = Console(highlight=False)
    table = Table(
        title=f"{outcome.document}, {outcome.model}, float32", title_justify="left", show_header=False
    )
    table.add_column()
    table.add_column(justify="right")
    for row in rows(outcome):
        table.add_row(*row)
    console.print(table)
    for problem in outcome.problems:
        console.print(f"not as it should be: {problem}", markup=False)
    console.print(f"output identical: {'yes' if outcome.identical else 'no'}")


def rows(outcome: Outcome) -> list[tuple[str, str]]:
    gain = outcome.plain.first_token_s / outcome.b.first_token_s
    shared = outcome.shared
    found = [
        ("prompt tokens", f"{outcome.b.prompt_tokens:,}"),
        ("tokens from kvwire", f"{outcome.b.cached_tokens:,} ({outcome.share:.1%})"),
        ("  of which from A's server", f"{shared.tokens:,}" if shared else ""),
        ("time to first token, A", format_duration(outcome.a.first_token_s)),
        ("time to first token, B", format_duration(outcome.b.first_token_s)),
        ("time to first token, B without kvwire", format_duration(outcome.plain.first_token_s)),
        ("B without kvwire / B", f"{gain:.1f}"),
        ("bytes stored by A", by_path(outcome.traffic.stored)),
        ("bytes from A's server to B's", by_path(shared.moved) if shared else ""),
        ("bytes retrieved by B", by_path(outcome.traffic.retrieved)),
    ]
    return [(what, value) for what, value in found if value]


def by_path(moved: dict[str, int]) -> str:
    return ", ".join(f"{format_size(count)} by {path}" for path, count in moved.items()) or "none"
