from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvwire.cli import app
from kvwire.errors import ConfigError, DeadlineExceeded, MissingExtra, OutOfSpace, TokensInvalid, Unavailable


def kvwire(*argv):
    return app.main(list(argv))


def test_help_lists_every_command_and_imports_none(capfd):
    assert kvwire("--help") == 0
    shown = capfd.readouterr().out
    for name, _path, _text in app.COMMANDS:
        assert f"│ {name} " in shown
    assert "│ server " in shown
    program = (
        "import sys; from kvwire.cli.app import main; main(['--help']);"
        "heavy = {'grpc', 'google.protobuf', 'numpy', 'torch', 'yaml', 'kvwire.client', 'kvwire.server'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stderr == "[]\n"


@pytest.mark.parametrize("command", [name for name, *_ in app.COMMANDS if name != "demo"])
def test_help_of_a_command_has_an_example(command, capfd):
    assert kvwire(command, "--help") == 0
    assert f"  kvwire {command}" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("pinng",), "no command 'pinng'. Did you mean 'ping'?"),
        (("xyzzy",), "The commands are bench, blend"),
        (("config", "shw"), "Did you mean 'show'?"),
        (("ping", "--cuont", "3"), "Did you mean --count?"),
        (("ping", "--count", "many"), 'unable to convert "many" into int'),
        (("ping", "--count", "0"), "--count: is at least 1"),
        (("ping", "--timeout", "soon"), "--timeout 'soon' is not a time"),
        (("ping", "--address", "nowhere"), "'nowhere' is no address"),
        (("ping", "--client-cert", "a.pem"), "--client-cert and --client-key belong together"),
        (("ping", "--token-file", "/none"), "--token-file /none: No such file"),
        (("ping", "--config", "/none"), "/none cannot be read"),
        (("lookup",), "by one of --tokens, --tokens-file and --text, of which none was given"),
        (("lookup", "--tokens", "1", "--text", "a"), "and not by --tokens and --text"),
        (("lookup", "--tokens", "1,-2"), "'-2' at position 1 is no token id"),
        (("lookup", "--text", "a"), "--text needs --tokenizer"),
        (("locate",), "none of them was given"),
        (("locate", "--tokens", "1", "--all"), "a prompt and --all given"),
        (("locate", "--tokens", "1"), "--namespace-from"),
        (("locate", "--keys", "abc"), "'abc' is no chunk key"),
        (("blend", "--tokens", "1"), "--namespace-from"),
    ],
)
def test_wrong_usage_exits_2_and_says_what_is_wrong(argv, told, capsys):
    assert kvwire(*argv) == app.USAGE
    printed = capsys.readouterr()
    assert told in printed.err
    assert printed.out == ""
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    "command",
    [("status",), ("ping",), ("lookup", "--tokens", "1"), ("members",), ("locate", "--all"), ("events",)],
)
def test_an_unreachable_server_exits_3(command, capsys, socket_path):
    assert kvwire(*command, "--address", f"unix:{socket_path}") == app.UNREACHABLE
    assert str(socket_path) in capsys.readouterr().err


def test_exit_code_of_each_kind_of_error():
    assert app.exit_code(Unavailable("x")) == 3
    assert app.exit_code(DeadlineExceeded("x")) == 3
    assert app.exit_code(ConfigError("x")) == 2
    assert app.exit_code(MissingExtra("x", "y")) == 2
    assert app.exit_code(TokensInvalid("x")) == 2
    assert app.exit_code(OutOfSpace("x")) == 1


def test_config_show_tells_values_and_origins(monkeypatch, tmp_path, capsys):
    file = tmp_path / "kvwire.yaml"
    file.write_text("client:\n  address: cache-1:7470\n  timeout: 3s\n")
    monkeypatch.setenv("KVWIRE_TIMEOUT", "1.5s")
    monkeypatch.setenv("KVWIRE_ADRESS", "x:1")
    assert kvwire("config", "show", "--config", str(file), "-o", "json") == 0
    client = json.loads(capsys.readouterr().out)["client"]
    assert client["address"] == {"value": "cache-1:7470", "origin": str(file)}
    assert client["timeout"] == {"value": "1.5s", "origin": "KVWIRE_TIMEOUT"}
    assert client["tls"] == {"value": "false", "origin": "default"}
    assert kvwire("config", "show", "client", "--timeout", "9", "--config", str(file)) == 0
    printed = capsys.readouterr()
    assert "--timeout" in printed.out
    assert "No program here reads KVWIRE_ADRESS" in printed.err


def test_config_show_of_the_server_takes_its_flags(capsys):
    assert kvwire("config", "show", "server", "--l1-size", "2GiB", "-o", "json") == 0
    server = json.loads(capsys.readouterr().out)["server"]
    assert server["l1_size"] == {"value": "2GiB", "origin": "--l1-size"}
    assert kvwire("config", "show", "server", "--l1-size", "2bananas") == app.USAGE
    assert "--l1-size '2bananas' is not a size" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m kvwire.cli config show | head -1; exit ${{PIPESTATUS[0]}}"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_without_the_extra_the_error_names_it():
    program = (
        "import sys; sys.modules['cyclopts'] = None;"
        "from kvwire.cli.app import main; sys.exit(main(['status']))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == app.USAGE
    assert "kvwire[cli]" in run.stderr
