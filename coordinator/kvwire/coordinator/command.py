"""`kvwire coordinator`: settings in, exit code out."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Final

from kvwire.cli import units
from kvwire.cli.flags import settings_command
from kvwire.coordinator.config import CoordinatorConfig
from kvwire.serving.allocator import calm_collector, keep_message_memory
from kvwire.serving.version import server_version
from kvwire.telemetry.logging import setup_logging
from kvwire.telemetry.tracing import setup_tracing

if TYPE_CHECKING:
    from kvwire.coordinator.app import Coordinator

HELP: Final = """Run a coordinator: it knows the cache servers of a fleet and which of them holds which chunk.

  kvwire coordinator --listen 127.0.0.1:7570
  kvwire coordinator --listen 127.0.0.1:7570 --http 127.0.0.1:7580 --state /var/lib/kvwire
  kvwire coordinator --listen 0.0.0.0:7570 --tls-cert c.pem --tls-key k.pem --token-file token

Servers join it with --coordinator. It learns all that it knows from them, also after a restart.
Ctrl-C and SIGTERM stop it: it takes no new work, lets calls in flight end (--drain)."""


def run(config: CoordinatorConfig) -> int:
    setup_logging(config.log_level, json_lines=config.log_json, server_id="coordinator")
    if config.otlp_endpoint:
        setup_tracing(
            "kvwire-coordinator", config.otlp_endpoint, ratio=config.trace_ratio, version=server_version()
        )
    return asyncio.run(serve(config))


async def serve(config: CoordinatorConfig) -> int:
    """Serve until SIGINT or SIGTERM. Raises ConfigError when it cannot start."""
    from kvwire.coordinator.app import Coordinator

    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    keep_message_memory()
    coordinator = Coordinator(config)
    await coordinator.start()
    calm_collector()
    say(banner(coordinator))
    await told.wait()
    say("kvwire coordinator: stopping")
    await coordinator.stop()
    return 0


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def banner(coordinator: Coordinator) -> str:
    core, config = coordinator.core, coordinator.config
    heartbeat, expiry = units.exact_duration(config.heartbeat), units.exact_duration(config.expire_after)
    lines = [
        f"kvwire coordinator {server_version()} is serving",
        *(f"  address     {address}" for address in core.addresses),
        f"  members     heartbeat every {heartbeat}, dropped after {expiry} of silence",
        f"  events      over {' and '.join(core.sources)}",
    ]
    if config.enable_blend_lookup:
        lines.append(f"  blend       index of at most {units.exact_size(config.blend_memory)}")
    if config.state:
        lines.append(f"  state       {config.state}, checkpoint {core.checkpoint}")
    if coordinator.http_address:
        lines.append(f"  http        http://{coordinator.http_address}/")
    lines += [
        "Next:",
        f"  kvwire server --coordinator {core.addresses[0]}",
        f"  kvwire members --address {core.addresses[0]}",
    ]
    return "\n".join(lines)


command = settings_command("coordinator", CoordinatorConfig, run, text=HELP)
