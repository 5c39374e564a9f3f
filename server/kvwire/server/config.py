"""All settings of the cache server, in one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass

from kvwire.cli.settings import setting
from kvwire.errors import ConfigError
from kvwire.server.tiers.settings import read_tiers

MIB = 1 << 20
MAX_CHUNK_TOKENS = 1 << 30
DATA_PATHS = ("shm", "ucx-local", "ucx-remote", "inline")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Sizes are in bytes, times in seconds. Precedence: flags > KVWIRE_* > YAML > these defaults."""

    listen: tuple[str, ...] = setting(
        "Where to serve gRPC: unix:PATH (a socket file, mode 0600) or HOST:PORT. Repeatable.",
        ("127.0.0.1:7470",),
    )
    l1_size: int = setting("Size of the memory tier.", 1024 * MIB, "bytes")
    chunk_size: int = setting("Smallest chunk size in tokens; negotiation may round it up.", 256)
    max_chunk_size: int = setting("Largest chunk size in tokens that may be negotiated.", 65536)
    policy: str = setting("Eviction policy: lru, arc, or tenant (lru with quotas for tenants).", "lru")
    watermark: float = setting("Fill of the memory tier above which eviction runs in the background.", 0.95)
    arena: str = setting(
        "Memory of the memory tier: shm (local clients map it) or private (huge pages, no shm path). Without "
        "the path shm it is private.",
        "shm",
    )
    data_paths: tuple[str, ...] = setting(
        "Data paths to offer, of: " + ", ".join(DATA_PATHS) + ".", DATA_PATHS
    )
    ucx_net_devices: str = setting(
        "Network devices for UCX between hosts, comma-separated. Empty: all that other hosts can reach.", ""
    )
    prefetch_deadline: float = setting(
        "Longest time that a lookup waits for what has to be brought into memory. 0: lookups bring nothing.",
        2.0,
        "seconds",
    )
    http: str = setting("HOST:PORT of /metrics and /healthz over HTTP. Empty: off.", "")
    server_id: str = setting("Name of this server, stable over restarts. Empty: the host's name.", "")
    state: str = setting(
        "Folder that keeps this server's own pins and quotas over a restart. Empty: none.", ""
    )

    l2: tuple[str, ...] = setting(
        "Lower tier, which outlives the memory, as a URL: file:///var/kv?size=100GiB, s3://BUCKET/PREFIX, "
        "gs://, az://, redis://HOST:PORT, valkey://, memory://. Repeatable.",
        (),
    )
    l2_key_file: str = setting("File with at least 32 random bytes; lower tiers are encrypted with it.", "")

    coordinator: tuple[str, ...] = setting(
        "Coordinator of the fleet that this server joins: unix:PATH or HOST:PORT. Repeatable.", ()
    )
    coordinator_ca: str = setting("PEM file with the CA of the coordinators' certificates; turns TLS on.", "")
    coordinator_cert: str = setting("PEM file with the certificate shown to coordinators.", "")
    coordinator_key: str = setting("PEM file with its private key.", "")
    coordinator_token_file: str = setting("File whose content is sent to coordinators as bearer token.", "")
    advertise: tuple[str, ...] = setting(
        "Where coordinators and other servers reach this one. Empty: where it listens. Repeatable.", ()
    )
    peers: bool = setting("Share chunks in memory with the other servers of the fleet, over UCX.", True)
    peer_deadline: float = setting(
        "Longest wait for a coordinator's answer to where chunks are.", 0.1, "seconds"
    )
    peer_connect: float = setting(
        "Longest wait for a UCX connection to another server, until something has come over it.",
        1.0,
        "seconds",
    )
    peer_timeout: float = setting("Longest wait for another server's answer to a call.", 1.0, "seconds")
    peer_ca: str = setting("PEM file with the CA of the other servers' certificates; turns TLS on.", "")
    peer_cert: str = setting("PEM file with the certificate shown to other servers.", "")
    peer_key: str = setting("PEM file with its private key.", "")
    peer_token_file: str = setting("File whose content is sent to other servers as bearer token.", "")
    report_events: str = setting("How events reach coordinators: grpc (to each one), kafka, or off.", "grpc")
    report_tokens: bool = setting("Tell the tokens of stored chunks, for blend lookups.", True)
    kafka: str = setting("Bootstrap servers of the Kafka that takes events, HOST:PORT,...", "")
    kafka_topic: str = setting("Topic of the events.", "kvwire-events")
    kafka_config: tuple[str, ...] = setting(
        "Further setting of librdkafka, KEY=VALUE (SASL, TLS). Repeatable.", (), secret=True
    )
    event_interval: float = setting("How long events are collected before they are sent.", 0.02, "seconds")
    journal_size: int = setting("Memory for events that have not arrived yet.", 64 * MIB, "bytes")
    enable_blend_lookup: bool = setting("Find chunks at any position of a prompt (MatchBlend).", False)
    blend_memory: int = setting("Memory of the blend index.", 256 * MIB, "bytes")
    blend_deadline: float = setting("Longest wait for the fleet's answer to a blend lookup.", 0.05, "seconds")

    tls_cert: str = setting("PEM file with the server's certificate chain; turns TLS on.", "")
    tls_key: str = setting("PEM file with the server's private key.", "")
    tls_client_ca: str = setting("PEM file with the CA of client certificates; turns mTLS on.", "")
    token_file: str = setting("File whose content clients send as bearer token.", "")
    insecure_bind: bool = setting("Allow a non-local address without TLS and token.", False)
    reflection: bool = setting("Serve gRPC reflection, for grpcurl and buf curl.", True)

    lookup_lease: float = setting("How long a lookup holds what it found.", 60.0, "seconds")
    read_lease: float = setting("How long a retrieve may take.", 30.0, "seconds")
    write_lease: float = setting("How long a store may take.", 30.0, "seconds")
    session_ttl: float = setting("How long an unused session lives.", 600.0, "seconds")
    registration_ttl: float = setting("How long a silent client stays registered.", 120.0, "seconds")
    sweep_interval: float = setting(
        "How often expired leases, sessions and clients are swept.", 1.0, "seconds"
    )
    idle_exit: float = setting(
        "Stop when no client has been registered for so long. 0: never.", 0.0, "seconds"
    )
    drain: float = setting("How long a stopping server waits for calls in flight.", 3.0, "seconds")

    max_message: int = setting("Largest gRPC message in either direction.", 16 * MIB, "bytes")
    max_in_flight: int = setting("Most calls served at once; above it a call is refused.", 256)
    max_items: int = setting("Most items of one batch call.", 1024)
    max_chunks: int = setting("Most chunks or keys that one call names.", 65536)
    max_slots: int = setting("Most slots that one call leases.", 16384)
    max_sessions: int = setting("Most live sessions.", 65536)
    max_registrations: int = setting("Most registered clients.", 1024)

    otlp_endpoint: str = setting(
        "OTLP/gRPC endpoint for traces, for example http://127.0.0.1:4317. Empty: off.", ""
    )
    trace_ratio: float = setting("Share of traces to record that no caller has decided on.", 1.0)
    log_level: str = setting("Log level.", "info")
    log_json: bool = setting("Log one JSON object per line.", False)

    def __post_init__(self) -> None:
        _check(bool(self.listen), "listen", "name at least one address")
        _check(self.l1_size >= MIB, "l1_size", "must be at least 1MiB")
        _check(
            1 <= self.chunk_size <= self.max_chunk_size <= MAX_CHUNK_TOKENS,
            "chunk_size",
            f"must be from 1 to --max-chunk-size, and that at most {MAX_CHUNK_TOKENS}",
        )
        _check(0 < self.watermark <= 1, "watermark", "must be above 0 and at most 1")
        _check(self.arena in ("shm", "private"), "arena", "must be shm or private")
        unknown = sorted(set(self.data_paths) - set(DATA_PATHS))
        _check(
            not unknown and bool(self.data_paths), "data_paths", f"must be some of {', '.join(DATA_PATHS)}"
        )
        _check(bool(self.tls_cert) == bool(self.tls_key), "tls_key", "and tls_cert belong together")
        _check(bool(self.tls_cert) or not self.tls_client_ca, "tls_client_ca", "needs tls_cert and tls_key")
        _check(len(set(self.coordinator)) == len(self.coordinator), "coordinator", "names one of them twice")
        read_tiers(self.l2)
        _check(bool(self.l2) or not self.l2_key_file, "l2_key_file", "needs --l2")
        pair = bool(self.coordinator_cert) == bool(self.coordinator_key)
        _check(pair, "coordinator_key", "and coordinator_cert belong together")
        pair = bool(self.peer_cert) == bool(self.peer_key)
        _check(pair, "peer_key", "and peer_cert belong together")
        _check(self.report_events in ("grpc", "kafka", "off"), "report_events", "must be grpc, kafka or off")
        _check(self.report_events != "kafka" or bool(self.kafka), "report_events", "kafka needs --kafka")
        _check(bool(self.kafka_topic), "kafka_topic", "must not be empty")
        _check(all("=" in each[1:] for each in self.kafka_config), "kafka_config", "is written KEY=VALUE")
        _check(self.journal_size >= MIB, "journal_size", "must be at least 1MiB")
        _check(self.blend_memory >= MIB, "blend_memory", "must be at least 1MiB")
        _check(self.blend_deadline >= 0, "blend_deadline", "must not be negative")
        _check(0 <= self.trace_ratio <= 1, "trace_ratio", "must be from 0 to 1")
        _check(self.prefetch_deadline >= 0, "prefetch_deadline", "must not be negative")
        _check(self.drain >= 0, "drain", "must not be negative")
        _check(self.idle_exit >= 0, "idle_exit", "must not be negative")
        for name in (
            "lookup_lease",
            "read_lease",
            "write_lease",
            "session_ttl",
            "registration_ttl",
            "sweep_interval",
            "event_interval",
            "peer_deadline",
            "peer_connect",
            "peer_timeout",
        ):
            _check(getattr(self, name) > 0, name, "must be above 0")
        for name in (
            "max_in_flight",
            "max_items",
            "max_chunks",
            "max_slots",
            "max_sessions",
            "max_registrations",
        ):
            _check(getattr(self, name) >= 1, name, "must be at least 1")
        _check(MIB + 4096 <= self.max_message < 1 << 31, "max_message", "must be from 1MiB + 4KiB to 2GiB")

    @property
    def reports_events(self) -> bool:
        """Whether anybody wants events."""
        wanted = self.report_events == "kafka" or bool(self.coordinator)
        return wanted and self.report_events != "off"


def _check(good: bool, name: str, problem: str) -> None:
    if not good:
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag} {problem}.", setting=name)
