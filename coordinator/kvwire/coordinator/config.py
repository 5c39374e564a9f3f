"""All settings of the coordinator, in one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass

from kvwire.cli.settings import setting
from kvwire.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """Sizes are in bytes, times in seconds. Precedence: flags > KVWIRE_* > YAML > these defaults."""

    listen: tuple[str, ...] = setting(
        "Where to serve gRPC: unix:PATH (a socket file, mode 0600) or HOST:PORT. Repeatable.",
        ("127.0.0.1:7570",),
    )
    http: str = setting("HOST:PORT of /metrics and /healthz over HTTP, and of the fleet's page.", "")

    heartbeat: float = setting("How often members are told to give a life sign.", 5.0, "seconds")
    expire_after: float = setting("Silence after which a member is dropped.", 30.0, "seconds")
    silent_after: float = setting(
        "How long a member's events may be missing until it is shown as silent.", 3.0, "seconds"
    )
    keep_l2: float = setting("How long the L2 of a lost server stays listed.", 86_400.0, "seconds")
    snapshot_timeout: float = setting(
        "How long a server may take for each page of its snapshot.", 10.0, "seconds"
    )
    enable_blend_lookup: bool = setting("Find chunks at any position of a prompt (MatchBlend).", False)
    blend_memory: int = setting("Memory of the blend index.", 256 * MIB, "bytes")

    state: str = setting(
        "Folder that keeps pins, quotas and the checkpoint over a restart. Empty: nothing is kept.", ""
    )
    checkpoint_interval: float = setting(
        "How often the directory is written to the state folder. 0: never.", 30.0, "seconds"
    )
    kafka: str = setting("Bootstrap servers of a Kafka that events come from, HOST:PORT,... Empty: off.", "")
    kafka_topic: str = setting("Topic of the events.", "kvwire-events")
    kafka_group: str = setting("Consumer group under which offsets show in Kafka's tools. Empty: none.", "")
    kafka_config: tuple[str, ...] = setting(
        "Further setting of librdkafka, KEY=VALUE (SASL, TLS). Repeatable.", (), secret=True
    )

    server_ca: str = setting("PEM file with the CA of the servers' certificates, for snapshots.", "")
    server_cert: str = setting("PEM file with the certificate shown to the servers.", "")
    server_key: str = setting("PEM file with its private key.", "")
    server_token_file: str = setting("File whose content is sent to the servers as bearer token.", "")

    tls_cert: str = setting("PEM file with the coordinator's certificate chain; turns TLS on.", "")
    tls_key: str = setting("PEM file with the coordinator's private key.", "")
    tls_client_ca: str = setting("PEM file with the CA of client certificates; turns mTLS on.", "")
    token_file: str = setting("File whose content clients send as bearer token.", "")
    insecure_bind: bool = setting("Allow a non-local address without TLS and token.", False)
    reflection: bool = setting("Serve gRPC reflection, for grpcurl and buf curl.", True)
    drain: float = setting("How long a stopping coordinator waits for calls in flight.", 2.0, "seconds")

    max_message: int = setting("Largest gRPC message in either direction.", 16 * MIB, "bytes")
    max_in_flight: int = setting("Most questions served at once; above it a call is refused.", 256)
    max_keys: int = setting("Most chunks or keys that one call names.", 65_536)
    max_watchers: int = setting("Most open streams of each kind of watch.", 256)

    otlp_endpoint: str = setting(
        "OTLP/gRPC endpoint for traces, for example http://127.0.0.1:4317. Empty: off.", ""
    )
    trace_ratio: float = setting("Share of traces to record that no caller has decided on.", 1.0)
    log_level: str = setting("Log level.", "info")
    log_json: bool = setting("Log one JSON object per line.", False)

    def __post_init__(self) -> None:
        _check(bool(self.listen), "listen", "name at least one address")
        for name in ("heartbeat", "expire_after", "silent_after", "keep_l2", "snapshot_timeout"):
            _check(getattr(self, name) > 0, name, "must be above 0")
        _check(self.expire_after >= 2 * self.heartbeat, "expire_after", "must be at least twice --heartbeat")
        _check(self.blend_memory >= MIB, "blend_memory", "must be at least 1MiB")
        _check(self.checkpoint_interval >= 0, "checkpoint_interval", "must not be negative")
        _check(self.drain >= 0, "drain", "must not be negative")
        _check(0 <= self.trace_ratio <= 1, "trace_ratio", "must be from 0 to 1")
        _check(bool(self.kafka_topic), "kafka_topic", "must not be empty")
        for each in self.kafka_config:
            key, separator, _ = each.partition("=")
            _check(bool(key and separator), "kafka_config", "is written KEY=VALUE")
        _check(bool(self.tls_cert) == bool(self.tls_key), "tls_key", "and tls_cert belong together")
        _check(bool(self.tls_cert) or not self.tls_client_ca, "tls_client_ca", "needs tls_cert and tls_key")
        _check(
            bool(self.server_cert) == bool(self.server_key), "server_key", "and server_cert belong together"
        )
        for name in ("max_in_flight", "max_keys", "max_watchers"):
            _check(getattr(self, name) >= 1, name, "must be at least 1")
        _check(MIB + 4096 <= self.max_message < 1 << 31, "max_message", "must be from 1MiB + 4KiB to 2GiB")


def _check(good: bool, name: str, problem: str) -> None:
    if not good:
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag} {problem}.", setting=name)
