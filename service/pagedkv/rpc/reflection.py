"""Server reflection under both of its names: newer tools ask for v1, older ones for v1alpha.

The two differ in their package only, so one servicer answers both, and v1 is described by v1alpha's own description.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

V1ALPHA: Final = reflection.SERVICE_NAME
V1: Final = V1ALPHA.replace("v1alpha", "v1")


def enable_reflection(service_names: Sequence[str], server: grpc.aio.Server) -> None:
    """Let clients ask the server for its services and their messages."""
    _describe_v1()
    servicer = reflection.aio.ReflectionServicer((*service_names, V1, V1ALPHA))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1, _handlers(servicer)),))


def _handlers(servicer: Any) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return {"ServerReflectionInfo": handler}


def _describe_v1() -> None:
    """Add v1's description to the pool of descriptions, unless it is there already."""
    name = reflection_pb2.DESCRIPTOR.name.replace("v1alpha", "v1")
    try:
        descriptor_pool.Default().FindFileByName(name)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        text = json_format.MessageToJson(file).replace("v1alpha", "v1")
        as_v1 = json_format.Parse(text, descriptor_pb2.FileDescriptorProto())
        descriptor_pool.Default().AddSerializedFile(as_v1.SerializeToString())
