"""What lower tiers need beyond the server's own dependencies: asked for when it is used, and named."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvwire.errors import ConfigError, MissingExtra
from kvwire.server.config import ServerConfig
from kvwire.server.tiers.backends import make_backend
from kvwire.server.tiers.backends.base import Place
from kvwire.server.tiers.crypt import Vault

OPTIONAL = ("obstore", "glide", "cryptography")
PROGRAM = f"""
import sys
import kvwire.server.app
from kvwire.server.config import ServerConfig
from kvwire.server.tiers.levels import make_tiers
make_tiers(ServerConfig(l2=("file:///var/empty?size=1GiB",)), "a", None)
print(*(name for name in {OPTIONAL!r} if name in sys.modules))
"""


def test_a_server_loads_none_of_them_for_nothing_or_a_folder():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    ("module", "make", "extra"),
    [
        ("obstore", lambda: make_backend(Place("s3", "bucket")), "l2"),
        ("obstore", lambda: make_backend(Place("memory", "")), "l2"),
        ("glide", lambda: make_backend(Place("redis", "host")), "valkey"),
        ("glide", lambda: make_backend(Place("valkey", "host")), "valkey"),
        ("cryptography", lambda: Vault(bytes(32)), "l2"),
    ],
)
def test_a_missing_one_is_told_with_the_command_for_it(module, make, extra, monkeypatch):
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"pip install 'kvwire\[{extra}\]'"):
        make()


def test_a_folder_needs_none(monkeypatch, tmp_path):
    for module in OPTIONAL:
        monkeypatch.setitem(sys.modules, module, None)
    make_backend(Place("file", str(tmp_path)))


def test_a_scheme_that_nobody_knows_is_refused():
    with pytest.raises(ConfigError, match="ftp"):
        ServerConfig(l2=("ftp://host/x?size=1GiB",)).check()
