from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvwire.cli.settings import load_settings, setting, settings_of
from kvwire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    listen: tuple[str, ...] = setting("Where to listen.", ("127.0.0.1:1",))
    l1_size: int = setting("Size.", 1 << 30, "bytes")
    lease: float = setting("Lease.", 30.0, "seconds")
    ratio: float = setting("Ratio.", 1.0)
    reflection: bool = setting("Reflection.", True)
    node: str | None = setting("Node.", None)
    token: str = setting("Token.", "", secret=True)

    def __post_init__(self):
        if self.l1_size < 1 << 20:
            raise ConfigError("--l1-size must be at least 1MiB.", setting="l1_size")


@pytest.fixture
def yaml_file(tmp_path):
    def write(text):
        path = tmp_path / "kvwire.yaml"
        path.write_text(text)
        return path

    return write


def test_defaults():
    loaded, origins = load_settings(Program, env={})
    assert loaded == Program()
    assert set(origins.values()) == {"default"}


def test_flags_over_environment_over_file_over_defaults(yaml_file):
    path = yaml_file("server:\n  l1_size: 2GiB\n  lease: 1min\n  ratio: 0.5\n  listen: [a:1, b:2]\n")
    env = {"KVWIRE_L1_SIZE": "3GiB", "KVWIRE_LEASE": "500ms", "KVWIRE_CONFIG": str(path)}
    flags = {"l1_size": "4GiB", "node": None, "reflection": False}
    loaded, origins = load_settings(Program, flags, env, section="server")
    assert loaded == Program(l1_size=4 << 30, lease=0.5, ratio=0.5, listen=("a:1", "b:2"), reflection=False)
    assert origins == {
        "l1_size": "--l1-size",
        "lease": "KVWIRE_LEASE",
        "ratio": str(path),
        "listen": str(path),
        "reflection": "--reflection",
        "node": "default",
        "token": "default",
    }


def test_repeated_and_comma_separated_lists():
    for given in (("a:1", "b:2"), ("a:1,b:2",), "a:1, b:2"):
        loaded, _ = load_settings(Program, {"listen": given}, {})
        assert loaded.listen == ("a:1", "b:2")


def test_yaml_texts_are_taken_as_written(yaml_file):
    path = yaml_file("listen: 0:80\nreflection: no\nnode: null\n")
    loaded, _ = load_settings(Program, env={}, yaml_path=path)
    assert loaded == Program(listen=("0:80",), reflection=False, node=None)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("KVWIRE_L1_SIZE", "lots", "--l1-size (from KVWIRE_L1_SIZE) 'lots' is not a size: write bytes"),
        ("KVWIRE_LEASE", "soon", "--lease (from KVWIRE_LEASE) 'soon' is not a time: write seconds"),
        ("KVWIRE_REFLECTION", "maybe", "is neither true nor false"),
        ("KVWIRE_L1_SIZE", "12", "--l1-size must be at least 1MiB. The value comes from KVWIRE_L1_SIZE."),
    ],
)
def test_a_bad_value_names_setting_value_and_origin(name, text, expected):
    with pytest.raises(ConfigError) as caught:
        load_settings(Program, env={name: text})
    assert expected in str(caught.value)
    assert caught.value.metadata["setting"] == name.removeprefix("KVWIRE_").lower()


def test_a_bad_flag_is_named_as_typed():
    with pytest.raises(ConfigError, match=r"^--l1-size 'x' is not a size"):
        load_settings(Program, {"l1_size": "x"}, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("l1_sise: 1GiB\n", "'l1_sise' is no setting. Did you mean 'l1_size'?"),
        ("zzz: 1\n", "config show"),
        ("- a\n", "NAME: VALUE"),
        ("a: [\n", "is not YAML"),
        ("l1_size: {a: 1}\n", "is not a size"),
    ],
)
def test_bad_files(yaml_file, text, expected):
    with pytest.raises(ConfigError) as caught:
        load_settings(Program, env={}, yaml_path=yaml_file(text))
    assert expected in str(caught.value)


def test_bad_section_and_missing_file(yaml_file, tmp_path):
    with pytest.raises(ConfigError, match="'sever' is no section"):
        load_settings(Program, env={}, yaml_path=yaml_file("sever: {}\n"), section="server")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(Program, env={}, yaml_path=tmp_path / "none.yaml")
    loaded, _ = load_settings(Program, env={}, yaml_path=yaml_file("client:\n  x: 1\n"), section="server")
    assert loaded == Program()


def test_shown_as_one_would_type_it():
    shown = {each.name: each.shown(each.default) for each in settings_of(Program)}
    assert shown == {
        "listen": "127.0.0.1:1",
        "l1_size": "1GiB",
        "lease": "30s",
        "ratio": "1.0",
        "reflection": "true",
        "node": "",
        "token": "",
    }
    assert settings_of(Program)[-1].shown("s3cret") == "(not shown)"
    with pytest.raises(ConfigError) as caught:
        load_settings(Program, {"l1_size": "1"}, {"KVWIRE_TOKEN": "s3cret"})
    assert "s3cret" not in str(caught.value)
