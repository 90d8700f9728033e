"""Reflection under both names: what a tool asks for, it gets, whichever of the two it knows."""

import asyncio
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2

from helpers.server import serving

PACKAGES = ["grpc.reflection.v1", "grpc.reflection.v1alpha"]
BUF = Path(sys.executable).parent / "buf"


async def ask(address, package, **question):
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(
            f"/{package}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )()
        await call.write(reflection_pb2.ServerReflectionRequest(**question))
        return await call.read()


async def described(address, package, symbol):
    """Return the first file that a symbol's description comes in."""
    answer = await ask(address, package, file_containing_symbol=symbol)
    return descriptor_pb2.FileDescriptorProto.FromString(answer.file_descriptor_response.file_descriptor_proto[0])


@pytest.mark.parametrize("package", PACKAGES)
async def test_reflection_of_either_name_lists_the_services_and_both_its_names(package):
    async with serving() as served:
        answer = await ask(served.address, package, list_services="")
        listed = {service.name for service in answer.list_services_response.service}
        assert listed > {f"{name}.ServerReflection" for name in PACKAGES}
        assert "KvCache" in str(await described(served.address, package, "pagedkv.v1.KvCache"))


async def test_reflection_describes_itself_under_the_name_that_is_asked_for():
    async with serving() as served:
        files = [await described(served.address, PACKAGES[0], f"{package}.ServerReflection") for package in PACKAGES]
    assert [file.package for file in files] == PACKAGES
    assert str(files[0]) == str(files[1]).replace("v1alpha", "v1")


@pytest.mark.parametrize("protocol", ["grpc-v1", "grpc-v1alpha"])
async def test_buf_curl_calls_with_what_reflection_tells_it(protocol):
    async with serving(num_blocks=8) as served:
        options = ["--protocol", "grpc", "--http2-prior-knowledge", "--reflect-protocol", protocol]
        url = f"http://{served.address}/pagedkv.v1.KvCache/GetUsage"
        command = [BUF, "curl", *options, "--data", "{}", url]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr
    assert '"totalCount":8' in done.stdout.replace(" ", "")
