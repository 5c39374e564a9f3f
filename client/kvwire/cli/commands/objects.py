"""`kvwire objects`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from kvwire.cli import render, units
from kvwire.cli.admin import (
    NO_SALT,
    NO_TENANT,
    AdminClient,
    AsJson,
    TenantFlags,
    Tier,
    chunks,
    open_admin,
    tier_number,
)
from kvwire.cli.connect import ClientSettings
from kvwire.cli.flags import command_app, with_settings
from kvwire.cli.fleet import tier_name, visible
from kvwire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT = """Which chunks has a server cached, where, whose, and what holds them?

  kvwire objects
  kvwire objects --tier l2 --tenant 5a1e96c1f0b2d3e4
  kvwire objects --all --json | jq -r '.chunks[].chunk_key'

Without --all it lists the first 100, or as many as --limit says. Chunks are in the order of their coming,
tier by tier; one that stays is listed once, whatever comes and goes meanwhile. A tenant is shown by a digest
of its salt (none: no salt), which --tenant takes, or is named by its salt (--salt-file). A narrow terminal
shows the beginning of a key; a pipe, a file and --json get all of it."""

PAGE: Final = 1000
SHOWN: Final = 100
WIDE: Final = 140
KEY_SHOWN: Final = 16
"""Of a key, in a terminal that is not WIDE."""
COLUMNS: Final = ("chunk key", "tier", "#size", "#objects", "held by", "model", "tenant")

command = command_app("objects", TEXT)


@command.default
@with_settings(ClientSettings, "client")
def objects(
    settings: ClientSettings,
    *,
    tier: Tier = "all",
    tenant: Annotated[TenantFlags, Parameter(name="*")] = NO_TENANT,
    limit: Annotated[int | None, Parameter(help="Most chunks to list.", show_default="100")] = None,
    everything: Annotated[
        bool, Parameter(name="--all", help="List all of them.", negative=(), show_default=False)
    ] = False,
    output: render.Output = "table",
    as_json: AsJson = False,
) -> int:
    if limit is not None and (everything or limit < 1):
        told = "and --all exclude each other" if everything else "is at least 1"
        raise ConfigError(f"--limit {told}.", setting="limit")
    most = None if everything else limit or SHOWN
    shown = _Json() if as_json or output == "json" else _Table()
    with open_admin(settings, "objects") as server:
        listing = Listing(server, tier, tenant.digest(), most)
        shown.begin()
        for page in listing.pages():
            shown.page(page)
            listing.tell_progress()
        shown.end(listing)
    return 0


@dataclass
class Listing:
    """One way through all pages, `most` chunks at most. Counts what came by."""

    server: AdminClient
    tier: str
    tenant: str
    most: int | None
    count: int = 0
    size: int = 0
    more: bool = False

    def pages(self) -> Iterator[list[dict[str, Any]]]:
        from kvwire.v1 import admin_service_pb2 as pb

        request = pb.ListObjectsRequest(tier=tier_number(self.tier), tenant=self.tenant)
        while True:
            left = PAGE if self.most is None else min(PAGE, self.most - self.count)
            request.page_size = left
            reply = self.server.ask("ListObjects", request)
            self.count += len(reply.chunks)
            self.size += sum(each.size_bytes for each in reply.chunks)
            request.page_token = reply.next_page_token
            if reply.chunks:
                yield [render.plain(each) for each in reply.chunks]
            if not request.page_token:
                return
            if self.most is not None and self.count >= self.most:
                self.more = True
                return

    def tell_progress(self) -> None:
        """Where somebody watches, and the chunks themselves go elsewhere."""
        if self.most is None and sys.stderr.isatty() and not sys.stdout.isatty():
            end = "" if self.count % PAGE == 0 else "\n"
            print(f"\r{chunks(self.count)}, {units.format_size(self.size)}", end=end, file=sys.stderr)


class _Json:
    """One object, written page by page: a listing may be longer than a memory is large."""

    def begin(self) -> None:
        sys.stdout.write('{"chunks": [')
        self._separator = "\n  "

    def page(self, page: list[dict[str, Any]]) -> None:
        for chunk in page:
            sys.stdout.write(self._separator + json.dumps(chunk))
            self._separator = ",\n  "

    def end(self, listing: Listing) -> None:
        more = json.dumps(listing.more)
        sys.stdout.write(f'\n], "count": {listing.count}, "size_bytes": {listing.size}, "more": {more}}}\n')


class _Table:
    def begin(self) -> None: ...

    def page(self, page: list[dict[str, Any]]) -> None:
        short = render.console().width < WIDE
        render.print_rows(COLUMNS, (_row(chunk, short=short) for chunk in page))

    def end(self, listing: Listing) -> None:
        if not listing.count:
            print("Nothing is cached there." if not listing.tenant else "Nothing of that tenant is there.")
            return
        told = f"{chunks(listing.count)}, {units.format_size(listing.size)}"
        print(f"{told} (there are more: --all lists them)" if listing.more else told)


def _row(chunk: dict[str, Any], *, short: bool) -> tuple[object, ...]:
    key = chunk["chunk_key"]
    holders = [f"{chunk['leases']} leases"] if chunk["leases"] else []
    holders += ["a pin"] if chunk["pinned"] else []
    return (
        f"{key[:KEY_SHOWN]}..." if short else key,
        tier_name(chunk),
        units.format_size(chunk["size_bytes"]),
        f"{chunk['objects']}{'' if chunk['complete'] else ' (not all)'}",
        ", ".join(holders) or "-",
        visible(chunk["model"]),
        chunk["tenant"] or NO_SALT,
    )
