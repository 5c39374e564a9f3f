"""Two hosts on this machine: namespaces with a network, /dev/shm, boot id and name of their own, and a cable.

    with two_hosts() as (near, far, link):
        subprocess.run([*far.prefix, "ping", "-c1", near.address])

They share the file system, so a socket file is a way to look into a server whose cable is cut.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import tempfile
import uuid
from dataclasses import dataclass
from functools import cache

import pytest

from support.link import MTU, Link, tun

_NAMES = (("near", "10.77.0.1"), ("far", "10.77.0.2"))
_NUMBERS = itertools.count()
_SETUP = """
set -e
mount -t sysfs sysfs /sys
mount -t tmpfs -o size={shm},mode=1777 kvwire-host /dev/shm
{kernel}
hostname {name}
ip link set lo up
echo ready
exec cat
"""


@dataclass(frozen=True)
class Host:
    """`prefix` goes before a command that shall run there."""

    name: str
    address: str
    pid: int

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("nsenter", f"--target={self.pid}", "--net", "--mount", "--ipc", "--uts", "--")

    def run(self, *command: str) -> str:
        done = subprocess.run([*self.prefix, *command], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextlib.contextmanager
def two_hosts(*, one_kernel: bool = False, shm: str = "512m"):
    """`one_kernel`: two containers on one host. Skips the test where this process may not make them."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        near, far = (stack.enter_context(_host(*each, shm, one_kernel)) for each in _NAMES)
        fds = [_plug_in(host) for host in (near, far)]
        link = Link(*fds)
        stack.callback(link.close)
        yield near, far, link


@cache
def why_not() -> str:
    """Why two hosts cannot be had here; empty if they can."""
    if os.geteuid() != 0:
        return "two hosts on one machine need root"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "two hosts on one machine need /dev/net/tun"
    command = ["unshare", "--net", "--mount", "--ipc", "--uts", "ip", "link", "set", "lo", "up"]
    try:
        tried = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as error:
        return f"two hosts on one machine need util-linux and iproute2: {error}"
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


@contextlib.contextmanager
def _host(name: str, address: str, shm: str, one_kernel: bool):
    """It lasts as long as its first process, which ends with this one: it reads from a pipe."""
    with tempfile.NamedTemporaryFile("w", prefix="kvw-boot-") as boot_id:
        boot_id.write(f"{uuid.uuid4()}\n")
        boot_id.flush()
        kernel = "" if one_kernel else f"mount --bind {boot_id.name} /proc/sys/kernel/random/boot_id"
        script = _SETUP.format(shm=shm, kernel=kernel, name=name)
        first = subprocess.Popen(
            ["unshare", "--net", "--mount", "--ipc", "--uts", "--propagation=private", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            said = first.stdout.readline()
            assert said == "ready\n", first.stderr.read()
            yield Host(name, address, first.pid)
        finally:
            first.communicate(timeout=10)


def _plug_in(host: Host) -> int:
    name = f"kvw{os.getpid() % 10**6}x{next(_NUMBERS)}"
    fd = tun(name)
    try:
        subprocess.run(["ip", "link", "set", name, "netns", str(host.pid), "name", "eth0"], check=True)
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "mtu", str(MTU), "up")
    except BaseException:
        os.close(fd)
        raise
    return fd


def sees(host: Host, path: str) -> list[str]:
    """The names in a folder, as that host sees it."""
    return host.run("ls", "-A", path).split()
