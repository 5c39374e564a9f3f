from __future__ import annotations

import pytest

from kvwire.errors import ConfigError
from kvwire.vllm.config import DEFAULT_ADDRESS, connector_config


def test_defaults(monkeypatch):
    monkeypatch.delenv("KVWIRE_ADDRESS", raising=False)
    config = connector_config({})
    assert config.address == DEFAULT_ADDRESS
    assert not config.save_decode
    assert not config.uses_tls


def test_the_environment_names_the_address_and_a_key_wins(monkeypatch):
    monkeypatch.setenv("KVWIRE_ADDRESS", "unix:/tmp/a.sock")
    assert connector_config({}).address == "unix:/tmp/a.sock"
    assert connector_config({"kvwire.address": "h:1"}).address == "h:1"


@pytest.mark.parametrize(
    "given", ["unix:/tmp/a, tcp://h:1", ["unix:/tmp/a", "h:1"], ["unix:///tmp/a", "h:1"], "unix:/tmp/a,,h:1,"]
)
def test_several_addresses_are_a_list_or_have_commas_between_them(given):
    assert connector_config({"kvwire.address": given}).addresses == ("unix:/tmp/a", "h:1")


def test_an_address_that_is_none_is_named():
    with pytest.raises(ConfigError, match="'h' is no address"):
        _ = connector_config({"kvwire.address": "h:1,h"}).addresses


def test_the_flags_of_a_server_that_is_started_here(tmp_path):
    extra = {"kvwire.autostart_l1_size": "8GiB", "kvwire.autostart_flags": "--chunk-size 512 --policy arc"}
    flags = ["--l1-size", "8GiB", "--idle-exit", "3600s", "--chunk-size", "512", "--policy", "arc"]
    assert connector_config(extra).server_flags() == flags
    token = str(tmp_path / "token")
    config = connector_config({"kvwire.autostart_idle_exit": 0, "kvwire.token_file": token})
    assert config.server_flags() == ["--l1-size", "1GiB", "--token-file", token]


def test_keys_of_others_are_left_alone():
    config = connector_config({"connectors": [], "lmcache.port": 1, "kvwire.heartbeat_interval": 3})
    assert config.heartbeat_interval == 3.0


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"kvwire.adress": "h:1"}, "did you mean kvwire.address"),
        ({"kvwire.zzz": 1}, "kvwire.save_decode"),
        ({"kvwire.save_decode": "yes"}, "kvwire.save_decode is 'yes'; it must be of type bool"),
        ({"kvwire.copy_threads": True}, "of type int"),
        ({"kvwire.copy_threads": -1}, "from 0 to 64"),
        ({"kvwire.heartbeat_interval": 0}, "0.05 to 3600"),
        ({"kvwire.heartbeat_interval": float("nan")}, "0.05 to 3600"),
        ({"kvwire.data_path": "pigeon"}, "auto, shm, ucx, inline"),
        ({"kvwire.tls_key": "k.pem"}, "belong together"),
        ({"kvwire.address": ["h:1", 2]}, "of type str"),
        ({"kvwire.autostart": True, "kvwire.address": "10.0.0.1:7470"}, "on this host"),
        ({"kvwire.autostart": True, "kvwire.tls": True}, "without TLS"),
        ({"kvwire.autostart_l1_size": "much"}, "a size such as 8GiB"),
        ({"kvwire.autostart_idle_exit": -1}, "a number of seconds"),
    ],
)
def test_a_wrong_setting_is_named(extra, text):
    with pytest.raises(ConfigError) as caught:
        connector_config(extra)
    assert text in str(caught.value)


def test_the_token_is_read_from_its_file(tmp_path):
    file = tmp_path / "token"
    config = connector_config({"kvwire.token_file": str(file)})
    with pytest.raises(ConfigError, match="cannot be read"):
        config.token()
    file.write_text("s3cret\n")
    assert config.token() == "s3cret"
    assert "s3cret" not in repr(config)
