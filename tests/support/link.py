"""A cable between two hosts that a test can make slow, lossy, thin, or pull out.

Packets go from one TUN device to the other through this process, so whoever sends over it has the kernel's
own TCP, with its retransmissions and timeouts.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass

TUN = "/dev/net/tun"
MTU = 9000
QUEUE_BYTES = 8 << 20
_SYN, _ACK = 0x02, 0x10
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def tun(name: str) -> int:
    """A new TUN device, in this process's network namespace until it is moved. It lives as its descriptor."""
    fd = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except BaseException:
        os.close(fd)
        raise
    return fd


@dataclass
class Quality:
    """`delay` in seconds, one way; `loss` as a share of packets; `rate` in bytes/s, 0 for no limit."""

    delay: float = 0.0
    loss: float = 0.0
    rate: float = 0.0


class Link:
    """Both directions of the cable. Change `quality` and pull it at any time, from any thread.

    `only_port` is a firewall that drops new TCP connections to other ports, without a word; 0 for none.
    """

    def __init__(self, first: int, second: int, seed: int = 1) -> None:
        self.quality = Quality()
        self.moved_bytes = 0
        self.dropped = 0
        self.only_port = 0
        self._cut_at: int | None = None
        self._random = random.Random(seed)
        self._ways = [_Way(first, second), _Way(second, first)]
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="test-link", daemon=True)
        self._thread.start()

    @property
    def is_cut(self) -> bool:
        return self._cut_at is not None and self.moved_bytes >= self._cut_at

    def cut(self) -> None:
        """From now on every packet is lost, and those under way too."""
        self._cut_at = 0

    def cut_after(self, nbytes: int) -> None:
        """Cut it when so many bytes more have gone over it, both ways together."""
        self._cut_at = self.moved_bytes + nbytes

    def mend(self) -> None:
        self._cut_at = None

    def close(self) -> None:
        os.write(self._wake_w, b"x")
        self._thread.join(10)
        for fd in (self._wake_r, self._wake_w, *(way.source for way in self._ways)):
            os.close(fd)

    def _run(self) -> None:
        sources = {way.source: way for way in self._ways}
        while True:
            now = time.monotonic()
            waits = [way.deliver(now, lost=self.is_cut) for way in self._ways]
            due = min((each for each in waits if each is not None), default=None)
            timeout = None if due is None else max(0.0, due - time.monotonic())
            ready, _, _ = select.select([*sources, self._wake_r], [], [], timeout)
            if self._wake_r in ready:
                return
            for fd in ready:
                self._take(sources[fd])

    def _loses(self, packet: bytes) -> bool:
        if self.is_cut or self._random.random() < self.quality.loss:
            return True
        return bool(self.only_port) and _connects_to(packet) not in (0, self.only_port)

    def _take(self, way: _Way) -> None:
        for _ in range(64):
            try:
                packet = os.read(way.source, 65536)
            except BlockingIOError:
                return
            except OSError:  # the device is down, or its namespace has gone
                time.sleep(0.01)
                return
            if self._loses(packet) or way.queued > QUEUE_BYTES:
                self.dropped += 1
            else:
                self.moved_bytes += len(packet)
                way.queue(packet, self.quality)


def _connects_to(packet: bytes) -> int:
    """The port that this packet asks for a TCP connection with; 0 for any other packet."""
    if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
        return 0
    start = (packet[0] & 0xF) * 4
    flags = packet[start + 13]
    return struct.unpack_from(">H", packet, start + 2)[0] if flags & _SYN and not flags & _ACK else 0


class _Way:
    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self.queued = 0
        self._target = target
        self._packets: deque[tuple[float, bytes]] = deque()
        self._free_at = 0.0

    def queue(self, packet: bytes, quality: Quality) -> None:
        begin = max(time.monotonic(), self._free_at)
        self._free_at = begin + (len(packet) / quality.rate if quality.rate else 0.0)
        self._packets.append((self._free_at + quality.delay, packet))
        self.queued += len(packet)

    def deliver(self, now: float, *, lost: bool) -> float | None:
        """Hand over what is due; returns when the next one is."""
        while self._packets and (lost or self._packets[0][0] <= now):
            packet = self._packets.popleft()[1]
            self.queued -= len(packet)
            if not lost:
                self._write(packet)
        return self._packets[0][0] if self._packets else None

    def _write(self, packet: bytes) -> None:
        try:
            os.write(self._target, packet)
        except OSError:  # down, gone, or full: lost
            return
