from __future__ import annotations

import contextlib

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvwire.client import Client
from kvwire.client.channel import TlsConfig
from kvwire.errors import Unauthenticated
from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import cache_service_pb2 as pb
from kvwire.v1 import cache_service_pb2_grpc as pb_grpc
from support.raw_client import RawClient, failure, tokens
from support.server_process import is_serving, open_channel, server_process
from support.waiting import eventually

TOKEN = "correct-horse"
SERVING = health_pb2.HealthCheckResponse.SERVING


class Files:
    """PEM files of one authority, a server's and a client's certificate, and a token."""

    def __init__(self, folder):
        self.authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self.authority.cert_pem.write_to_path(self.ca)
        self.cert, self.key = self.issue(folder, "server", "localhost")
        self.client_cert, self.client_key = self.issue(folder, "client", "engine.test")
        self.token = folder / "token"
        self.token.write_text(f"{TOKEN}\n")

    def issue(self, folder, name, identity):
        made = self.authority.issue_cert(identity)
        cert, key = folder / f"{name}.pem", folder / f"{name}.key"
        cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        made.private_key_pem.write_to_path(key)
        return cert, key

    @property
    def tls(self):
        return (f"--tls-cert={self.cert}", f"--tls-key={self.key}")

    def credentials(self, *, mutual=False):
        pair = (self.client_key.read_bytes(), self.client_cert.read_bytes()) if mutual else (None, None)
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), *pair)


@pytest.fixture
def files(short_tmp):
    return Files(short_tmp)


@contextlib.contextmanager
def tls_server(short_tmp, files, *flags, mutual=False, listen="127.0.0.1:0"):
    credentials = files.credentials(mutual=mutual)
    with server_process(short_tmp, *files.tls, *flags, listen=listen, credentials=credentials) as server:
        server.address = server.address.replace("127.0.0.1", "localhost").replace("0.0.0.0", "localhost")
        yield server


def ping(channel, **options):
    return pb_grpc.CacheServiceStub(channel).Ping(pb.PingRequest(), timeout=5, **options)


def test_tls_takes_who_trusts_the_authority_and_nobody_else(short_tmp, files):
    with tls_server(short_tmp, files) as server:
        assert ping(server.channel(credentials=files.credentials())).header.incarnation
        strange = trustme.CA().cert_pem.bytes()
        for credentials in (None, grpc.ssl_channel_credentials(strange)):
            refused = failure(ping, server.channel(credentials=credentials))
            assert refused.code == grpc.StatusCode.UNAVAILABLE
        with Client(server.address, tls=TlsConfig(ca=str(files.ca))) as client:
            assert client.ping()


def test_mtls_asks_for_the_clients_certificate(short_tmp, files):
    with tls_server(short_tmp, files, f"--tls-client-ca={files.ca}", mutual=True) as server:
        assert ping(server.channel(credentials=files.credentials(mutual=True))).header.incarnation
        refused = failure(ping, server.channel(credentials=files.credentials()))
        assert refused.code == grpc.StatusCode.UNAVAILABLE
        tls = TlsConfig(ca=str(files.ca), cert=str(files.client_cert), key=str(files.client_key))
        with Client(server.address, tls=tls) as client:
            assert client.ping()
            client.clear()
        eventually(lambda: "certificate='engine.test'" in server.output())
        (line,) = [line for line in server.output().splitlines() if " clear " in line]
        assert "peer=ipv" in line
        assert line.endswith("tier=all model=all tenant=all dropped=0 kept=0")


def test_all_interfaces_may_be_bound_with_credentials(short_tmp, files):
    with tls_server(short_tmp, files, f"--token-file={files.token}", listen="0.0.0.0:0") as server:
        channel = server.channel(credentials=files.credentials())
        assert failure(ping, channel).reason == "TOKEN_INVALID"
        assert ping(channel, metadata=[("authorization", f"Bearer {TOKEN}")])


def test_the_bearer_token_is_asked_of_every_call_but_health(short_tmp, files):
    with server_process(short_tmp, f"--token-file={files.token}") as server:
        assert is_serving(server.address)
        channel = server.channel()
        for value in (None, TOKEN, f"Bearer {TOKEN}x", "Bearer ", "Basic " + TOKEN):
            metadata = [] if value is None else [("authorization", value)]
            refused = failure(ping, channel, metadata=metadata)
            assert refused.code == grpc.StatusCode.UNAUTHENTICATED
            assert refused.reason == "TOKEN_INVALID"
            assert TOKEN not in refused.text
        assert ping(channel, metadata=[("authorization", f"Bearer {TOKEN}")])
        stub = pb_grpc.CacheServiceStub(channel)
        # Streams too, also one that never sends anything.
        assert failure(list, stub.Attach(pb.AttachRequest(), timeout=5)).reason == "TOKEN_INVALID"
        assert failure(stub.WriteChunks, iter(()), timeout=5).reason == "TOKEN_INVALID"
        unknown = channel.unary_unary("/kvwire.v1.CacheService/Nothing")
        assert failure(unknown, b"", timeout=5).reason == "TOKEN_INVALID"
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=5)
        assert next(watched).status == SERVING
        watched.cancel()


def test_the_client_library_sends_the_token(short_tmp, files):
    with server_process(short_tmp, f"--token-file={files.token}") as server:
        with Client(server.address, token=TOKEN) as client:
            assert client.negotiate(1).chunk_size
        with Client(server.address, token="wrong") as client, pytest.raises(Unauthenticated):
            client.ping()


def test_a_salt_is_not_shown_anywhere(short_tmp):
    """BL-55: the raw salt is in no listing and in no line of the log."""
    salt = "tenant-secret-salt"
    with server_process(short_tmp, "--chunk-size=4", "--log-level=debug") as server:
        client = RawClient(server.channel()).register("inline")
        assert client.store("s", tokens(2), salt) == 2
        assert client.hits(tokens(2), salt) == 2
        assert client.hits(tokens(2), "another") == client.hits(tokens(2)) == 0
        client.lookup("open", tokens(2), salt=salt)
        (session,) = client.admin.ListSessions(admin.ListSessionsRequest(), timeout=5).sessions
        assert session.tenant
        assert salt not in f"{session}{client.status()}"
        bad = failure(client.lookup, "bad", tokens(1), salt=salt + "\n")
        assert bad.reason == "INVALID_FIELD"
        assert salt not in f"{bad}"
    assert salt not in server.output()


def test_a_plain_client_at_a_tls_port_harms_nobody(short_tmp, files):
    with tls_server(short_tmp, files) as server:
        good = server.channel(credentials=files.credentials())
        for _ in range(3):
            with contextlib.closing(open_channel(server.address)) as plain:
                assert failure(ping, plain).code == grpc.StatusCode.UNAVAILABLE
        assert ping(good)
