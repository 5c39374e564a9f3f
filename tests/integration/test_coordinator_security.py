"""Snapshots from servers that ask for TLS, a client certificate and a token."""

from __future__ import annotations

from concurrent import futures

import grpc
import trustme

from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import peer_service_pb2_grpc
from support.coordinator_process import FAST, coordinator_process
from support.fleet_member import Member, store
from support.waiting import eventually

CURRENT = pb.REPORTING_STATE_CURRENT


class Guarded(Member):
    """As a server with --tls-client-ca and --token-file."""

    seen: tuple[str, ...] = ()

    def serve_tls(self, authority: trustme.CA) -> None:
        own = authority.issue_cert("localhost")
        self.tls = grpc.server(futures.ThreadPoolExecutor(2))
        peer_service_pb2_grpc.add_PeerServiceServicer_to_server(self, self.tls)
        ca = authority.cert_pem.bytes()
        pair = (own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes())
        credentials = grpc.ssl_server_credentials([pair], ca, require_client_auth=True)
        self.address = f"localhost:{self.tls.add_secure_port('localhost:0', credentials)}"
        self.tls.start()

    def SnapshotPlacements(self, request, context):
        self.seen = tuple(value for name, value in context.invocation_metadata() if name == "authorization")
        if self.seen != ("Bearer secret",):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        yield from super().SnapshotPlacements(request, context)


def test_a_snapshot_is_pulled_with_certificate_and_token(short_tmp):
    authority = trustme.CA()
    own = authority.issue_cert("coordinator")
    authority.cert_pem.write_to_path(short_tmp / "ca.pem")
    own.private_key_pem.write_to_path(short_tmp / "key.pem")
    own.cert_chain_pems[0].write_to_path(short_tmp / "cert.pem")
    (short_tmp / "token").write_text("secret\n")
    flags = [f"--server-{name}={short_tmp / name}.pem" for name in ("ca", "cert", "key")]
    token = f"--server-token-file={short_tmp / 'token'}"
    with (
        coordinator_process(short_tmp, *FAST, *flags, token) as coordinator,
        Guarded(coordinator, "a", short_tmp) as a,
    ):
        a.serve_tls(authority)
        a.held = [store(1)]
        a.register()

        def is_whole():
            a.beat()
            return a.me().reporting == CURRENT

        eventually(is_whole)
        assert a.holders(1) == [("a", 1)]
        a.tls.stop(0).wait()


def test_the_first_address_that_answers_is_taken(short_tmp):
    with coordinator_process(short_tmp, *FAST) as coordinator, Member(coordinator, "a", short_tmp) as a:
        a.held = [store(1)]
        info = pb.ServerInfo(
            server_id="a",
            incarnation=a.incarnation,
            addresses=["no address", "127.0.0.1:1", a.address],
            chunk_size=4,
            digest_function=1,
        )
        a.stub.RegisterServer(pb.RegisterServerRequest(server=info))

        def is_whole():
            a.beat()
            return a.me().reporting == CURRENT

        eventually(is_whole)
        assert a.holders(1) == [("a", 1)]
