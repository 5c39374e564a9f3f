from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
from cyclopts import App, Parameter

from kvwire.cli import flags
from kvwire.cli.settings import setting
from kvwire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    listen: tuple[str, ...] = setting("Where to listen.", ("127.0.0.1:1",))
    l1_size: int = setting("Size.", 1 << 30, "bytes")
    reflection: bool = setting("Reflection.", True)


def call(app, *argv):
    return app(list(argv), exit_on_error=False, print_error=False, result_action="return_value")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("KVWIRE_CONFIG", "KVWIRE_LISTEN", "KVWIRE_L1_SIZE", "KVWIRE_REFLECTION"):
        monkeypatch.delenv(name, raising=False)


def test_a_program_gets_its_settings_and_its_exit_code_comes_back(tmp_path):
    seen = []

    def run(settings):
        seen.append(settings)
        return 7 if settings.reflection else None

    app = flags.settings_command("server", Program, run, text="Runs.\n\n  kvwire server")
    assert flags.PROGRAMS.pop("server") is Program
    file = tmp_path / "kvwire.yaml"
    file.write_text("server:\n  l1_size: 2GiB\n")
    assert call(app, "--listen", "a:1", "--listen", "b:2,c:3", "--config", str(file)) == 7
    assert call(app, "--no-reflection", "--l1-size", "3GiB") == 0
    assert seen == [
        Program(listen=("a:1", "b:2", "c:3"), l1_size=2 << 30),
        Program(l1_size=3 << 30, reflection=False),
    ]
    with pytest.raises(ConfigError, match="--l1-size"):
        call(app, "--l1-size", "x")


def test_a_commands_own_parameters_stand_beside_the_settings(monkeypatch):
    @flags.with_settings(Program, "server")
    def command(
        settings: Program,
        name: str,
        *,
        count: Annotated[int, Parameter(help="How many.")] = 1,
    ) -> tuple[Program, str, int]:
        return settings, name, count

    app = App()
    app.default(command)
    monkeypatch.setenv("KVWIRE_L1_SIZE", "64MiB")
    assert call(app, "x", "--count", "3") == (Program(l1_size=64 << 20), "x", 3)


def test_help_names_variable_and_default(capfd):
    app = flags.settings_command("server", Program, lambda settings: 0, text="Runs.")
    del flags.PROGRAMS["server"]
    call(app, "--help")
    shown = " ".join(capfd.readouterr().out.replace("│", " ").split())
    assert "Size. [env: KVWIRE_L1_SIZE] [default: 1GiB]" in shown
    assert "--reflection --no-reflection" in shown
    assert "--empty-listen" not in shown


def test_paragraphs_are_joined_and_examples_kept():
    text = "Short.\n\n  kvwire a\n  kvwire b\n\nLong\ntext.\n\nA file:\n  x: 1"
    assert flags.unwrapped(text) == (
        "Short.\n\nFor example:\n  kvwire a\n  kvwire b\n\nLong text.\n\nA file:\n  x: 1"
    )
