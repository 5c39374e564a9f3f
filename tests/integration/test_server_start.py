from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import stat
import subprocess
import urllib.request
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvwire.cli.app import main
from support import leaks
from support.raw_client import RawClient
from support.server_process import open_channel, ownerless, run_server, server_process
from support.waiting import eventually

SERVICES = ("", "kvwire.v1.CacheService", "kvwire.v1.AdminService", "kvwire.v1.PeerService")


@pytest.fixture
def own_logging():
    logger = logging.getLogger("kvwire")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate


def test_it_serves_soon_says_where_and_stops_on_sigterm(server, record_property):
    text = server.output()
    assert f"address     {server.address}" in text
    assert "memory      16MiB, eviction lru" in text
    assert "data paths  shm" in text
    assert text.rstrip().endswith(f"Next:\n  kvwire status --address {server.address}")
    rss = psutil.Process(server.pid).memory_info().rss
    record_property("start_seconds", f"{server.started_in:.2f}")
    record_property("idle_mib", f"{rss / 2**20:.0f}")
    # Loose: the machine is shared. The bare numbers are measured by hand.
    assert server.started_in < 10
    assert rss < 200 << 20


def test_a_socket_file_is_for_its_owner_only(server):
    mode = Path(server.address.removeprefix("unix:")).stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    RawClient(server.channel()).register("shm").let_go()
    entries = server.shm_entries()
    assert len(entries) == 2
    assert {stat.S_IMODE((leaks.SHM / name).stat().st_mode) for name in entries} == {0o600}


def test_ctrl_c_stops_it_as_well(short_tmp):
    with server_process(short_tmp) as server:
        server.terminate(signal.SIGINT)


def test_every_service_says_that_it_serves(server):
    health = health_pb2_grpc.HealthStub(server.channel())
    for name in SERVICES:
        reply = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as unknown:
        health.Check(health_pb2.HealthCheckRequest(service="kvwire.v1.Nothing"), timeout=5)
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND


def test_port_0_is_told_and_a_port_in_use_is_refused(short_tmp):
    with server_process(short_tmp, listen="127.0.0.1:0") as server:
        assert not server.address.endswith(":0")
        done = run_server("--listen", server.address)
        assert done.returncode == 2
        assert f"--listen {server.address}: the address is in use" in done.stderr
        assert RawClient(server.channel()).ping()


def test_a_port_of_another_program_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        done = run_server("--listen", address)
    assert done.returncode == 2
    assert "in use" in done.stderr


def test_half_a_name_in_use_is_in_use(short_tmp, capfd, own_logging):
    """`localhost` may stand for two addresses, of which one is free."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"localhost:{other.getsockname()[1]}"
        assert main(["server", "--l1-size=1MiB", "--listen", address]) == 2
    assert f"--listen {address}: the address is in use" in capfd.readouterr().err


def test_the_socket_of_a_live_server_is_refused(server):
    done = run_server("--listen", server.address)
    assert done.returncode == 2
    assert f"--listen {server.address}: another server is running there" in done.stderr
    assert RawClient(server.channel()).ping()


def test_a_dead_left_over_socket_is_replaced(short_tmp):
    path = short_tmp / "kvwire.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    with server_process(short_tmp) as server:
        assert RawClient(server.channel()).ping()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--listen", "unix:{folder}/file"], "there is a file of another kind"),
        (["--listen", "unix:{folder}/none/kvwire.sock"], "the folder {folder}/none does not exist"),
        (["--listen", "unix:{folder}/" + "x" * 100], "a socket path has 1 to 107 bytes"),
        (["--listen", "unix:"], "a socket path has 1 to 107 bytes"),
        (["--listen", "nowhere"], "write unix:PATH or HOST:PORT"),
        (["--listen", "127.0.0.1:70000"], "write unix:PATH or HOST:PORT"),
        (["--listen", "192.0.2.1:0", "--insecure-bind"], "not on this host"),
        (["--listen", "0.0.0.0:0"], "--listen 0.0.0.0:0 is reachable from other hosts"),
        (["--listen", "[::]:0"], "--insecure-bind"),
        (["--listen", "0.0.0.0:0", "--token-file", "{folder}/file"], "give --tls-cert and --tls-key"),
        (["--listen", "unix:{folder}/s", "--http", "nowhere"], "--http nowhere: write HOST:PORT"),
        (["--policy", "fifo"], "use one of: lru, arc, tenant"),
        (["--chunk-size", "0"], "--chunk-size"),
        (["--chunk-size", "512", "--max-chunk-size", "256"], "--max-chunk-size"),
        (["--drain", "-1"], "--drain"),
        (["--data-paths", "carrier-pigeon"], "--data-paths"),
        (["--token-file", "{folder}/none"], "--token-file {folder}/none: No such file"),
        (["--token-file", "{folder}/empty"], "write one token"),
        (["--tls-cert", "{folder}/none"], "--tls-key"),
        (["--tls-cert", "{folder}/file", "--tls-key", "{folder}/file"], "cannot be used together"),
        (["--tls-client-ca", "{folder}/file"], "needs tls_cert"),
        (["--l1-size", "1000000GiB"], "--l1-size"),
    ],
)
def test_what_it_refuses_to_start_with(short_tmp, flags, problem, capfd, own_logging):
    (short_tmp / "file").write_text("hello")
    (short_tmp / "empty").write_text("\n")
    flags = [flag.replace("{folder}", str(short_tmp)) for flag in flags]
    where = [] if "--listen" in flags else ["--listen", f"unix:{short_tmp}/s"]
    before = leaks.shm_entries()
    # As a process would: everything from the arguments on.
    assert main(["server", "--l1-size=1MiB", *where, *flags]) == 2
    said = capfd.readouterr().err
    assert problem.replace("{folder}", str(short_tmp)) in said
    assert said.splitlines()[-1].startswith("kvwire: ")
    assert "Traceback" not in said
    assert not ownerless(leaks.shm_entries() - before)
    assert not (short_tmp / "s").exists()
    assert (short_tmp / "file").read_text() == "hello"


def test_a_non_local_bind_can_be_forced(short_tmp):
    with server_process(short_tmp, "--insecure-bind", listen="0.0.0.0:0") as server:
        port = server.address.rpartition(":")[2]
        with contextlib.closing(open_channel(f"127.0.0.1:{port}")) as channel:
            assert RawClient(channel).ping()


def test_bl68_a_small_dev_shm_is_refused_with_the_setting_to_change(short_tmp):
    """In a mount namespace of its own, with 16 MB of shared memory as a container may have."""
    if os.geteuid():
        pytest.skip("mounting needs root")
    prefix = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=16m shm /dev/shm && exec "$@"', "sh")
    if subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode:
        pytest.skip("mount namespaces are not allowed here")
    done = run_server("--listen", f"unix:{short_tmp}/s", "--l1-size", "64MiB", prefix=prefix)
    assert done.returncode == 2
    assert "--l1-size" in done.stderr
    assert "16 MiB free" in done.stderr
    # What fits is served, filled to the last byte, and no signal comes.
    with server_process(short_tmp, "--l1-size=15MiB", "--chunk-size=4", prefix=prefix) as server:
        client = RawClient(server.channel()).register("inline", object_bytes=1 << 20)
        for seed in range(20):
            client.store(f"s{seed}", client_tokens(seed))
        assert client.status().counters.stored_objects == 20


def client_tokens(seed):
    return seed.to_bytes(4, "little") * 4


def test_what_a_killed_server_left_is_swept_by_the_next(short_tmp):
    with server_process(short_tmp, stop=False) as server:
        RawClient(server.channel()).register("shm").let_go()
        assert len(server.shm_entries()) == 2
        server.kill()
        # Whichever server starts first does it: others of this machine too.
        with server_process(short_tmp) as following:
            assert not server.shm_entries()
            assert RawClient(following.channel()).ping()


def test_a_live_servers_memory_is_not_swept(short_tmp, server):
    with server_process(short_tmp, listen=f"unix:{short_tmp}/second.sock"):
        assert server.arena in server.shm_entries()
    assert RawClient(server.channel()).ping()


def test_metrics_and_health_over_http_beside_grpc(short_tmp):
    with server_process(short_tmp, "--http=127.0.0.1:0") as server:
        line = eventually(lambda: [each for each in server.output().splitlines() if "http://" in each])
        assert "/metrics and /healthz" in line[0]
        url = line[0].split()[1]
        assert b"kvwire_" in fetch(url)
        assert fetch(url.replace("metrics", "healthz")) == b"ok\n"


def fetch(url):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=5) as reply:
        return reply.read()
