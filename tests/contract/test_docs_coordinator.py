"""What docs/coordinator.md states in settings and numbers is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from kvwire.cli.settings import settings_of
from kvwire.coordinator import convert, fleet, pulls, questions, service, watching
from kvwire.coordinator.config import CoordinatorConfig
from kvwire.server.config import ServerConfig

PAGE = (Path(__file__).parents[2] / "docs/coordinator.md").read_text()
LIMITS = {
    "entries of a batch": fleet.MAX_EVENTS,
    "chunks of a page (ListChunks)": questions.MAX_PAGE,
    "batches that wait for a watcher of events": watching.MAX_QUEUED,
    "watcher that takes nothing": watching.STUCK_S,
    "members": service.MAX_MEMBERS,
    "addresses of a member": convert.MAX_ADDRESSES,
    "features of a member": convert.MAX_FEATURES,
    "stores that a heartbeat lists": convert.MAX_TIERS,
    "bytes of an address, a feature, a version": convert.MAX_TEXT_BYTES,
    "bytes of a server id": convert.MAX_ID_BYTES,
    "snapshots pulled at once": pulls.AT_ONCE,
}


def rows(title):
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_settings_are_the_programs():
    told = {flag.strip("`"): default for flag, default, _ in rows("Settings")}
    assert told == {each.flag: each.shown(each.default) for each in settings_of(CoordinatorConfig)}


def test_the_settings_of_a_member_are_the_servers():
    known = {each.flag: each.shown(each.default) for each in settings_of(ServerConfig)}
    told = {row[0].strip("`"): row[1] for row in rows("What a server does") if row[0].startswith("`--")}
    assert len(told) > 10
    assert told == {flag: known[flag] for flag in told}


def test_the_limits_are_the_codes():
    flags = {each.flag for each in settings_of(CoordinatorConfig)}
    told = {what: limit for what, limit, _ in rows("Limits")}
    for what, limit in told.items():
        if limit.startswith("`"):
            assert limit.strip("`") in flags
        else:
            assert int(re.sub(r"\D", "", limit)) == LIMITS[what], what
    assert LIMITS.keys() <= told.keys()
    assert f"slices of {fleet.SLICE_EVENTS} entries" in PAGE
