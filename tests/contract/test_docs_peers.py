"""What docs/peers.md states in settings and numbers is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from kvwire.cli.settings import settings_of
from kvwire.server import lending
from kvwire.server.config import ServerConfig
from kvwire.server.peers import hints, links, source

PAGE = (Path(__file__).parents[2] / "docs/peers.md").read_text()
LIMITS = {
    "live leases of peers": lending.MAX_LOANS,
    "servers asked for one prompt": source.MAX_ASKED,
    "hints that are kept": hints.MAX_HINTS,
    "connections that are kept": links.MAX_LINKS,
}


def rows(title):
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_settings_are_the_servers():
    known = {each.flag: (each.shown(each.default), each.help) for each in settings_of(ServerConfig)}
    told = {flag.strip("`"): (default, text) for flag, default, text in rows("Settings")}
    assert told == {flag: known[flag] for flag in known if flag.startswith("--peer")}


def test_the_limits_are_the_codes():
    for what, limit, _ in rows("Limits"):
        if not limit.startswith("`"):
            assert int(re.sub(r"\D", "", limit)) == LIMITS.pop(what), what
    assert not LIMITS
