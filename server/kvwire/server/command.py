"""`kvwire server`: settings in, exit code out."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Final

from kvwire.cli import units
from kvwire.cli.flags import settings_command
from kvwire.server.config import ServerConfig
from kvwire.server.idle import IdleWatch
from kvwire.serving.allocator import calm_collector, keep_message_memory
from kvwire.serving.supervisor import every
from kvwire.serving.version import server_version
from kvwire.telemetry.logging import setup_logging
from kvwire.telemetry.tracing import setup_tracing

if TYPE_CHECKING:
    from kvwire.server.app import CacheServer
    from kvwire.server.tiers.counters import TierStatus

_IDLE_LOOK_S: Final = 5.0
HELP: Final = """Run a cache server: it keeps the KV cache of prompts for inference engines.

  kvwire server --listen unix:/run/kvwire.sock --l1-size 8GiB
  kvwire server --listen 127.0.0.1:7470 --http 127.0.0.1:7480
  kvwire server --listen 0.0.0.0:7470 --tls-cert c.pem --tls-key k.pem --token-file token

Ctrl-C and SIGTERM stop it: it takes no new work, lets calls in flight end (--drain), leaves no trace."""


def run(config: ServerConfig) -> int:
    setup_logging(config.log_level, json_lines=config.log_json, server_id=config.server_id)
    if config.otlp_endpoint:
        setup_tracing(
            "kvwire-server",
            config.otlp_endpoint,
            ratio=config.trace_ratio,
            instance_id=config.server_id,
            version=server_version(),
        )
    return asyncio.run(serve(config))


async def serve(config: ServerConfig) -> int:
    """Serve until SIGINT or SIGTERM. Raises ConfigError when it cannot start."""
    from kvwire.server.app import CacheServer

    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    keep_message_memory()
    server = CacheServer(config)
    await server.start()
    calm_collector()
    if config.idle_exit:
        _watch_idle(server, told)
    say(banner(server))
    await told.wait()
    say("kvwire server: stopping")
    await server.stop()
    return 0


def _watch_idle(server: CacheServer, told: asyncio.Event) -> None:
    """Tell the server to stop once nobody needs it any more."""
    core = server.core
    watch = IdleWatch(server.config.idle_exit, core.now())

    def look() -> None:
        if watch.is_over(len(core.engine.status().registrations), core.now()) and not told.is_set():
            say(f"kvwire server: no client for {units.exact_duration(server.config.idle_exit)}")
            told.set()

    core.supervisor.start("idle", every(min(server.config.idle_exit / 4, _IDLE_LOOK_S), look))


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def banner(server: CacheServer) -> str:
    core, config = server.core, server.config
    lines = [
        f"kvwire server {server_version()} is serving",
        *(f"  address     {address}" for address in core.addresses),
        f"  memory      {units.exact_size(config.l1_size)}, eviction {config.policy}",
        *(f"  lower tier  {tier.location}, {_told(tier)}" for tier in core.tiers.status()),
        f"  chunk size  at least {config.chunk_size} tokens, settled by the first engine",
        f"  data paths  {', '.join(core.plane.paths)}",
        *(f"              no {name}: {why}" for name, why in core.plane.off.items()),
    ]
    if server.http_address:
        lines.append(f"  http        http://{server.http_address}/metrics and /healthz")
    lines += ["Next:", f"  kvwire status --address {core.addresses[0]}"]
    return "\n".join(lines)


def _told(tier: TierStatus) -> str:
    if tier.problem:
        return tier.problem
    return f"{units.format_size(tier.used_bytes)} of {units.exact_size(tier.capacity_bytes)}"


command = settings_command("server", ServerConfig, run, text=HELP)
