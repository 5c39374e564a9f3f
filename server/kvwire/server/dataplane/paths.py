"""Which data paths this server has, and why it lacks the others."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Literal

from kvwire.server.dataplane import DataPlane
from kvwire.server.dataplane.inline import InlinePath
from kvwire.server.dataplane.shm import ShmPath
from kvwire.transfer import net
from kvwire.transfer.shm import SharedArena
from kvwire.transfer.ucx_options import UcxOptions

if TYPE_CHECKING:
    from kvwire.server.config import ServerConfig
    from kvwire.server.dataplane import ServerPath
    from kvwire.transfer.arena import GrowingArena

LOCAL_LANES: Final = 4
"""Threads at most that copy between processes of this host, where the kernel goes page by page."""


def make_plane(config: ServerConfig, arena: GrowingArena, host_id: str) -> DataPlane:
    paths: dict[str, ServerPath] = {}
    off: dict[str, str] = {}
    for name in config.data_paths:
        found = _make(name, config, arena, host_id)
        if isinstance(found, str):
            off[name] = found
        else:
            paths[name] = found
    return DataPlane(paths, off)


def _make(name: str, config: ServerConfig, arena: GrowingArena, host_id: str) -> ServerPath | str:
    if name == "inline":
        return InlinePath(arena)
    if name == "shm":
        return ShmPath(arena, host_id) if isinstance(arena, SharedArena) else "the arena is private (--arena)"
    if find_spec("ucxx") is None:
        return "ucxx is not installed: pip install 'kvwire[ucx-cu12]'"
    from kvwire.server.dataplane.ucx import UcxPath

    return UcxPath(_ucx_options(name, config), arena, host_id)


def _ucx_options(name: str, config: ServerConfig) -> UcxOptions:
    devices = tuple(part.strip() for part in config.ucx_net_devices.split(",") if part.strip())
    net.check_devices(devices, "--ucx-net-devices")
    kind: Literal["local", "remote"] = "local" if name == "ucx-local" else "remote"
    lanes = min(LOCAL_LANES, len(os.sched_getaffinity(0))) if kind == "local" else 1
    return UcxOptions(kind=kind, role="server", devices=devices, setting="--ucx-net-devices", lanes=lanes)
