"""Reflection under both names: grpcurl up to 1.8 asks for v1alpha, newer tools ask for v1 first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2 import DESCRIPTOR

if TYPE_CHECKING:
    from collections.abc import Sequence

V1_NAME = "grpc.reflection.v1.ServerReflection"


class ReflectionServicer(reflection.aio.ReflectionServicer):  # type: ignore[misc]
    """Finds methods too, which protobuf's own search does not: `describe package.Service.Method`."""

    def _file_containing_symbol(self, request: Any, fully_qualified_name: str) -> Any:
        try:
            service = self._pool.FindMethodByName(fully_qualified_name).containing_service
        except KeyError:
            return super()._file_containing_symbol(request, fully_qualified_name)
        return super()._file_containing_symbol(request, service.full_name)


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """The messages of v1 and v1alpha are the same on the wire; only the service's name differs."""
    names = (*services, reflection.SERVICE_NAME)
    servicer: Any = ReflectionServicer(names)
    service = DESCRIPTOR.services_by_name["ServerReflection"]
    method = service.methods_by_name["ServerReflectionInfo"]
    messages = DESCRIPTOR.message_types_by_name
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=_class_of(messages["ServerReflectionRequest"]).FromString,
        response_serializer=_class_of(messages["ServerReflectionResponse"]).SerializeToString,
    )
    for name in (V1_NAME, reflection.SERVICE_NAME):
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {method.name: handler}),))


def _class_of(descriptor: Any) -> Any:
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(descriptor)
