"""The contract as it was: stubs without what has been added since, and a lock file without a board."""

from __future__ import annotations

import fcntl
import os
import secrets
from typing import TYPE_CHECKING

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from kvwire.transfer.liveness import FOLDER
from kvwire.v1 import cache_service_pb2

if TYPE_CHECKING:
    from pathlib import Path

    import grpc

ADDED = {"Ticket": {"arrival_word"}}
"""Fields by message that a client of the version before does not have."""


def _files(file, found):
    for each in file.dependencies:
        _files(each, found)
    found.setdefault(file.name, file)
    return found


def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    dropped = set()
    for file in _files(cache_service_pb2.DESCRIPTOR, {}).values():
        proto = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(proto)
        for message in proto.message_type:
            for field in [field for field in message.field if field.name in ADDED.get(message.name, ())]:
                message.field.remove(field)
                dropped.add(message.name)
        pool.Add(proto)
    assert dropped == set(ADDED)
    return pool


_POOL = _pool()


class _Method:
    def __init__(self, channel: grpc.Channel, method) -> None:
        self._request, self._reply = (
            message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type)
        )
        path = f"/{method.containing_service.full_name}/{method.name}"
        ends = (method.client_streaming, method.server_streaming)
        kind = "_".join("stream" if streaming else "unary" for streaming in ends)
        self._streams = method.client_streaming
        self._call = getattr(channel, kind)(
            path,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=self._reply.FromString,
        )

    def __call__(self, request, **options):
        asked = map(self._former, request) if self._streams else self._former(request)
        return self._call(asked, **options)

    def _former(self, message):
        former = self._request.FromString(message.SerializeToString())
        former.DiscardUnknownFields()
        return former


class PreviousStub:
    """`CacheServiceStub` of the version before: what has been added since is neither sent nor to be had."""

    def __init__(self, channel: grpc.Channel) -> None:
        for method in _POOL.FindServiceByName("kvwire.v1.CacheService").methods:
            setattr(self, method.name, _Method(channel, method))


class NoBoard:
    """What a server that gives no words has in the place of a board."""

    def __len__(self) -> int:
        return 0

    def give(self, lease_id: int) -> int:
        return 0

    def take_back(self, lease_id: int) -> None:
        """Nothing was given."""

    def doubt(self) -> None:
        """Nobody would see it."""


class PreviousLock:
    """The server's side of a lock file that is a lock and no more."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.board = NoBoard()
        self._fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)

    @classmethod
    def create(cls, arena_name: str) -> PreviousLock:
        return cls(f"{arena_name}.lock-{secrets.token_hex(8)}")

    def is_held(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        os.close(self._fd)
        self._path.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return FOLDER / self.name
