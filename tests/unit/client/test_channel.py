from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvwire.client.channel import ChannelConfig, TlsConfig, parse_target
from kvwire.client.deadlines import DEADLINES, Deadlines
from kvwire.errors import ConfigError
from kvwire.v1 import admin_service_pb2, cache_service_pb2


@pytest.mark.parametrize(
    ("text", "target", "local"),
    [
        ("unix:/run/kvwire.sock", "unix:/run/kvwire.sock", True),
        ("unix:///run/kvwire.sock", "unix:/run/kvwire.sock", True),
        ("unix:kvwire.sock", "unix:kvwire.sock", True),
        ("127.0.0.1:7470", "dns:///127.0.0.1:7470", True),
        ("localhost:7470", "dns:///localhost:7470", True),
        ("[::1]:7470", "dns:///[::1]:7470", True),
        ("tcp://localhost:5555", "dns:///localhost:5555", True),
        ("10.0.0.7:7470", "dns:///10.0.0.7:7470", False),
        ("cache.example.com:7470", "dns:///cache.example.com:7470", False),
    ],
)
def test_addresses(text, target, local):
    parsed = parse_target(text)
    assert (parsed.grpc_target, parsed.is_local) == (target, local)


@pytest.mark.parametrize(
    "text", ["", "localhost", "localhost:", ":7470", "h:0", "h:65536", "h:x", "::1:7470", "unix:"]
)
def test_what_is_no_address_is_refused_with_a_hint(text):
    with pytest.raises(ConfigError, match=r"unix:PATH|\[::1\]"):
        parse_target(text)


def test_a_socket_path_that_the_system_would_cut_is_refused():
    with pytest.raises(ConfigError, match="longer than the 107"):
        parse_target("unix:/" + "x" * 107)
    parse_target("unix:/" + "x" * 106)


def options(address: str) -> dict[str, object]:
    return dict(ChannelConfig(parse_target(address)).options())


def test_bl58_local_targets_never_use_a_proxy_and_backoff_is_bounded():
    for address in ("unix:/x", "127.0.0.1:1", "localhost:1", "[::1]:1"):
        assert options(address)["grpc.enable_http_proxy"] == 0
    remote = options("10.0.0.7:1")
    assert "grpc.enable_http_proxy" not in remote
    assert remote["grpc.max_reconnect_backoff_ms"] <= 1000
    assert remote["grpc.min_reconnect_backoff_ms"] <= 2000


def test_bl59_message_limits_are_raised_in_both_directions():
    for name in ("grpc.max_send_message_length", "grpc.max_receive_message_length"):
        assert options("unix:/x")[name] == 16 << 20


def test_a_token_is_not_shown():
    assert "s3cret" not in repr(ChannelConfig(parse_target("unix:/x"), token="s3cret"))


def test_half_a_client_certificate_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="key"):
        TlsConfig(cert=str(tmp_path / "c.pem")).credentials()
    with pytest.raises(ConfigError, match=r"ca\.pem cannot be read"):
        TlsConfig(ca=str(tmp_path / "ca.pem")).credentials()


def test_every_call_of_the_contract_has_a_deadline():
    services = (
        cache_service_pb2.DESCRIPTOR.services_by_name["CacheService"],
        admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"],
    )
    methods = {method.name for service in services for method in service.methods}
    assert methods == set(DEADLINES)
    assert all(0 < seconds <= 60 for seconds in DEADLINES.values())


def test_deadlines_are_overridden_by_name_only():
    assert Deadlines({"Lookup": 0.5})["Lookup"] == 0.5
    assert Deadlines({"Lookup": 0.5})["Ping"] == DEADLINES["Ping"]
    with pytest.raises(ConfigError, match="LookUp"):
        Deadlines({"LookUp": 1})
    with pytest.raises(ConfigError, match="above 0"):
        Deadlines({"Lookup": 0})


IMPORT = """
import sys, time
start = time.process_time()
import kvwire.client
took = time.process_time() - start
heavy = {"torch", "ucxx", "vllm", "opentelemetry", "grpc_status"} & set(sys.modules)
print(took, *heavy)
"""


def test_the_import_is_quick_and_brings_nothing_heavy():
    runs = [
        subprocess.run(
            [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(3)
    ]
    assert all(len(words) == 1 for words in runs), runs
    assert min(float(words[0]) for words in runs) < 0.3


def test_the_client_library_needs_no_optional_package():
    found = {
        line.strip()
        for path in Path("client/kvwire/client").glob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith(
            ("import torch", "import ucxx", "import vllm", "from torch", "from ucxx", "from vllm")
        )
    }
    assert not found
