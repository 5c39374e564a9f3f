"""A client library on another host than its server: the path is found by itself, and what the network does
to it ends as failed blocks or misses."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvwire.v1 import admin_service_pb2, admin_service_pb2_grpc
from support.coordinator_process import coordinator_process
from support.far_clients import FarClient, far_client
from support.hosts import sees, two_hosts
from support.link import Quality
from support.raw_client import RawClient, tokens
from support.server_process import server_process
from support.waiting import eventually

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

BLOCKS, BLOCK_BYTES = 64, 2 * (64 << 10)
IN_CHUNK = 4
MANY, MANY_BYTES = 128, 128 * BLOCK_BYTES
ADDRESS = "10.77.0.1:7470"
SHORT = (
    "--write-lease=3",
    "--read-lease=3",
    "--lookup-lease=3",
    "--registration-ttl=3",
    "--sweep-interval=0.1",
)
DEADLINES = dict.fromkeys(
    ("BeginStore", "CommitStore", "AbortStore", "BeginRetrieve", "EndRetrieve", "Lookup", "RegisterKvCache"),
    3.0,
)


class Hosts:
    """A server on one host, clients on the other, and the cable between them."""

    def __init__(self, near, far, link, folder):
        self.near, self.far, self.link = near, far, link
        self._folder = folder

    @contextmanager
    def server(self, port=7470):
        """It also serves on a socket file, so that it can be looked at while the cable is out."""
        folder = self._folder / str(port)
        folder.mkdir(exist_ok=True)
        flags = ("--listen", f"10.77.0.1:{port}", "--insecure-bind", "--chunk-size=64", "--l1-size=128MiB")
        with server_process(folder, *flags, *SHORT, prefix=self.near.prefix) as running:
            yield running

    def client(self, port=7470, **options):
        return far_client(self.far, f"10.77.0.1:{port}", deadlines=DEADLINES, **options)


@contextmanager
def made(**options):
    folder = Path(tempfile.mkdtemp(prefix="kvw-", dir="/tmp"))
    with two_hosts(**options) as (near, far, link):
        yield Hosts(near, far, link, folder)
        assert sees(near, "/dev/shm") == sees(far, "/dev/shm") == []
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def hosts():
    with made() as both:
        yield both


@pytest.fixture(scope="module")
def served(hosts):
    with hosts.server() as running:
        yield running


@pytest.fixture(scope="module")
def first(hosts, served):
    with hosts.client() as client:
        yield client


@pytest.fixture
def link(hosts):
    yield hosts.link
    hosts.link.mend()
    hosts.link.quality, hosts.link.only_port = Quality(), 0


@pytest.fixture
def client(link, first):
    """The same one for all tests: that it is well again after each is part of them."""
    well_again(first)
    return first


def well_again(client):
    eventually(lambda: client.do("healthy")["healthy"], within=30)


def status(server):
    with server.channel() as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        return stub.GetStatus(admin_service_pb2.GetStatusRequest(), timeout=5)


def at_rest(server):
    """No memory is held for anybody."""
    found = status(server)
    held = (found.leases.lookup, found.leases.read, found.leases.write)
    return not any((*held, found.memory.reserved_bytes, found.memory.quarantined_bytes))


def puts(client, seed, blocks=BLOCKS):
    """Over a network that is well. On a busy machine it may still be too late, and is tried again."""
    eventually(lambda: client.do("store", seed, blocks)["ok"], within=30)


def found_of(client, seed):
    """Blocks of a prompt that the server has."""
    answers = (client.do("retrieve", seed, MANY) for _ in range(20))
    return next(answer["hit"] for answer in answers if "raised" not in answer)


def comes_back(client, seed, blocks=BLOCKS):
    def once():
        answer = client.do("retrieve", seed, blocks)
        assert not answer.get("wrong")
        return answer["ok"] and (answer["hit"], answer["good"]) == (blocks, blocks)

    return eventually(once, within=30)


def test_the_path_is_found_by_itself_and_the_bytes_come_back(served, client, link):
    assert client.path == "ucx-remote"
    before = link.moved_bytes
    puts(client, 1)
    assert link.moved_bytes - before > BLOCKS * BLOCK_BYTES
    comes_back(client, 1)
    eventually(lambda: at_rest(served))


@pytest.mark.parametrize(
    "quality", [Quality(delay=0.025), Quality(loss=0.01), Quality(loss=0.05)], ids=["50 ms", "1 %", "5 %"]
)
def test_a_slow_or_lossy_network_changes_no_byte(quality, client, link):
    seed = 10 + int(quality.loss * 100)
    link.quality = quality
    puts(client, seed, 16)
    comes_back(client, seed, 16)


def test_a_short_interruption_is_bridged(client, link):
    def bridged(seed):
        link.cut_after(MANY_BYTES // 2)
        client.send("store", seed, MANY)
        eventually(lambda: link.is_cut)
        link.mend()
        return client.answer()["ok"]

    seed = next(each for each in (20, 21, 22) if bridged(each))  # a busy machine may be too slow for one
    comes_back(client, seed, MANY)


def test_a_cable_pulled_in_the_middle_of_a_store(served, client, link):
    """Failed blocks at the deadline, memory that comes back, a miss; then all is well with the cable in."""
    puts(client, 30, BLOCKS)
    link.cut_after(MANY_BYTES // 2)
    stored = client.do("store", 31, MANY)
    assert link.is_cut
    assert (stored["ok"], stored["stored"]) == (False, 0)
    assert stored["failed"] > 0
    eventually(lambda: at_rest(served), within=20)
    link.mend()
    well_again(client)
    assert client.do("healthy")["path"] == "ucx-remote"
    assert found_of(client, 31) == 0
    comes_back(client, 30)
    puts(client, 31, MANY)
    comes_back(client, 31, MANY)


def test_a_cable_pulled_in_the_middle_of_a_retrieve(served, client, link):
    """What had come is right, all the rest is named as failed."""
    puts(client, 40, MANY)
    link.cut_after(MANY_BYTES // 2)
    found = client.do("retrieve", 40, MANY)
    assert link.is_cut
    assert not found["ok"]
    assert 0 < found["good"] < MANY
    assert found["wrong"] == 0
    assert found["good"] + found["failed"] * IN_CHUNK == MANY
    eventually(lambda: at_rest(served), within=20)
    link.mend()
    well_again(client)
    comes_back(client, 40, MANY)


def test_a_network_too_slow_for_the_deadline(served, client, link):
    """Whatever was in time is there, and the rest is failed or missed."""
    link.quality = Quality(rate=2e6)
    stored = client.do("store", 50, BLOCKS)
    assert not stored["ok"]
    assert stored["failed"] + stored["stored"] == BLOCKS // IN_CHUNK
    eventually(lambda: at_rest(served), within=20)
    link.quality = Quality()
    well_again(client)
    found = client.do("retrieve", 50, BLOCKS)
    assert found["wrong"] == 0
    assert found["hit"] <= stored["stored"] * IN_CHUNK
    puts(client, 50, BLOCKS)
    comes_back(client, 50)


def test_bl19_a_client_killed_in_the_middle_of_a_store(hosts, served, client, link):
    with hosts.client() as dying:
        link.quality = Quality(rate=20e6)
        dying.send("store", 60, MANY)
        eventually(lambda: status(served).memory.reserved_bytes)
        dying.process.kill()
    eventually(lambda: at_rest(served), within=20)
    link.quality = Quality()
    well_again(client)
    assert found_of(client, 60) == 0


@pytest.mark.long
def test_a_server_killed_in_the_middle_of_a_store(hosts, link):
    """The next one at its address is used without a new start of the client."""
    with hosts.server(7471) as dying, hosts.client(7471) as client:
        link.cut_after(MANY_BYTES // 2)
        client.send("store", 70, MANY)
        eventually(lambda: link.is_cut)
        dying.kill()
        link.mend()
        assert not client.answer()["ok"]
        with hosts.server(7471):
            well_again(client)
            assert found_of(client, 70) == 0
            puts(client, 70, MANY)
            comes_back(client, 70, MANY)


@pytest.mark.long
def test_containers_of_one_host_without_shared_memory():
    """One kernel, two /dev/shm: what the host's id promises does not hold, and the next path is taken."""
    with made(one_kernel=True) as hosts, hosts.server(), hosts.client() as client:
        assert client.path == "ucx-remote"
        puts(client, 1, BLOCKS)
        comes_back(client, 1)


@pytest.mark.long
def test_a_firewall_that_lets_only_grpc_through(hosts, client, link):
    """UCX has ports of its own. Who cannot reach them moves bytes inline, and nobody else is held up."""
    link.only_port = 7470
    behind = FarClient(hosts.far, ADDRESS)
    try:
        for seed in range(80, 90):
            puts(client, seed, 16)
            comes_back(client, seed, 16)
        assert behind.wait_registered() == "inline"
        puts(behind, 90, BLOCKS)
        comes_back(behind, 90)
    finally:
        behind.close()


@pytest.mark.timeout(60)
def test_servers_between_which_only_grpc_comes_through(hosts, link, short_tmp):
    """They lease to each other, and no byte comes: a miss after a moment, and then nothing is asked for."""
    with ExitStack() as stack:
        coordinator = stack.enter_context(coordinator_process(short_tmp, "--heartbeat=0.2"))
        servers, clients = {}, {}
        for name, host in (("a", hosts.near), ("b", hosts.far)):
            (short_tmp / name).mkdir()
            address = f"{host.address}:7480"
            where = ("--listen", address, "--advertise", address, "--insecure-bind", "--chunk-size=4")
            joining = ("--server-id", name, "--coordinator", coordinator.address, "--peer-connect=0.5")
            flags = (*where, *joining, "--peer-deadline=5", "--peer-timeout=5")
            prefix = (*host.prefix, "env", "no_proxy=10.77.0.0/24")
            running = stack.enter_context(server_process(short_tmp / name, *flags, prefix=prefix))
            servers[name] = running
            clients[name] = RawClient(running.channel()).register("inline")
            stack.callback(clients[name].let_go)
        prompts = [tokens(6, seed) for seed in range(3)]
        for prompt in prompts:
            clients["a"].store("stored", prompt)
        eventually(lambda: status(servers["b"]).sharing.peers)
        link.only_port = 7480
        first = eventually(lambda: lookup_of_located(clients["b"], servers["b"], prompts[0]))
        assert (first.hit_chunks, first.peer_chunks) == (0, 0)
        told = status(servers["b"]).sharing.peers[0]
        assert (told.failed_transfers, told.fetched_chunks) == (1, 0)
        assert told.problem
        assert clients["b"].lookup("resting", prompts[1]).hit_chunks == 0
        assert status(servers["b"]).sharing.peers[0].failed_transfers == 1
        assert at_rest_but_for_lookups(servers["b"])
        link.only_port = 0
        eventually(lambda: clients["b"].lookup("open", prompts[2]).peer_chunks == 6)
        assert not status(servers["b"]).sharing.peers[0].problem


def lookup_of_located(client, server, prompt):
    """The answer to the first lookup for which the directory knew something; None before that."""
    before = status(server).sharing.located_chunks
    found = client.lookup("located", prompt)
    return found if status(server).sharing.located_chunks > before else None


def at_rest_but_for_lookups(server):
    memory = status(server).memory
    return not (memory.reserved_bytes or memory.quarantined_bytes)
