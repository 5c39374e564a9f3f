"""The network interfaces of this host, and which of them another host can reach."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvwire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

_SYS: Final = Path("/sys/class")
_IFF_UP: Final = 1
_IFF_LOOPBACK: Final = 8
_SIOCGIFADDR: Final = 0x8915


@dataclass(frozen=True, slots=True)
class Interface:
    """One interface. `addresses` are those that have a meaning beyond its own link."""

    name: str
    is_up: bool
    is_loopback: bool
    is_bridge: bool
    addresses: tuple[str, ...]

    @property
    def is_advertisable(self) -> bool:
        """Whether another host may be told to come here."""
        return self.is_up and not self.is_loopback and not self.is_bridge and bool(self.addresses)


def list_interfaces() -> list[Interface]:
    """All network interfaces, in the order of their index."""
    return [_interface(name) for _, name in sorted(socket.if_nameindex())]


def rdma_devices() -> list[str]:
    """RDMA ports by UCX's names (device:port)."""
    found = (_SYS / "infiniband").glob("*/ports/*") if (_SYS / "infiniband").is_dir() else ()
    return sorted(f"{port.parts[-3]}:{port.name}" for port in found)


def advertisable_devices() -> list[str]:
    """What a worker for remote peers offers by default: never loopback, never a local bridge."""
    return [*rdma_devices(), *(each.name for each in list_interfaces() if each.is_advertisable)]


def check_devices(names: Sequence[str], setting: str) -> None:
    """Raises ConfigError, listing the real names, for a device that this host does not have."""
    real = [each.name for each in list_interfaces()] + rdma_devices()
    unknown = [name for name in names if name not in real]
    if unknown:
        raise ConfigError(
            f"{setting}: this host has no network device {', '.join(unknown)}. It has: {', '.join(real)}.",
            setting=setting,
            unknown=", ".join(unknown),
            known=", ".join(real),
        )


def _interface(name: str) -> Interface:
    folder = _SYS / "net" / name
    flags = int(_read(folder / "flags") or "0", 16)
    return Interface(
        name=name,
        is_up=bool(flags & _IFF_UP),
        is_loopback=bool(flags & _IFF_LOOPBACK),
        is_bridge=(folder / "bridge").is_dir(),
        addresses=tuple(_ipv4(name) + _ipv6(name)),
    )


def _ipv4(name: str) -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return []
    return [socket.inet_ntoa(reply[20:24])]


def _ipv6(name: str) -> list[str]:
    lines = [line.split() for line in _read(Path("/proc/net/if_inet6")).splitlines()]
    found = [ipaddress.IPv6Address(bytes.fromhex(line[0])) for line in lines if line[-1] == name]
    return [str(address) for address in found if not address.is_link_local]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
