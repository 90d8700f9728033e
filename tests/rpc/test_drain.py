"""The server's last seconds: not ready at once, new calls refused with a reason, running ones ended in good order."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from helpers.generation_server import expected_tokens, generating, slow_decoder
from helpers.scripted_engine import ScriptedDecoder, forced, make_prompt
from helpers.server import serving
from helpers.waiting import PATIENCE, until
from helpers.wire import make_queries, make_rows
from pagedkv import errors
from pagedkv.client import AsyncClient
from pagedkv.client.asynchronous import make_attend_request
from pagedkv.rpc.server import ServerConfig, make_listener
from pagedkv.v1 import generation_pb2, generation_pb2_grpc, kv_cache_pb2, kv_cache_pb2_grpc

pytestmark = pytest.mark.usefixtures("backend")
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def collect(stream):
    return [chunk async for chunk in stream]


@contextlib.asynccontextmanager
async def draining(served, grace):
    """Drain while the block runs; at its end the drain must end too."""
    stopping = asyncio.ensure_future(served.server.stop(grace))
    await until(lambda: not served.server.is_ready, "drain")
    yield
    await asyncio.wait_for(stopping, PATIENCE)


async def status_of(address, call):
    """Return code and reason of a call on a new connection."""
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel)
    infos = [error_details_pb2.ErrorInfo.FromString(d.value) for d in rpc_status.from_call(caught.value).details]
    return caught.value.code(), [info.reason for info in infos]


CALLS = {
    "unary": lambda channel: kv_cache_pb2_grpc.KvCacheStub(channel).GetUsage(kv_cache_pb2.GetUsageRequest()),
    "server stream": lambda channel: collect(
        generation_pb2_grpc.GenerationStub(channel).Generate(generation_pb2.GenerateRequest())
    ),
    "both": lambda channel: collect(kv_cache_pb2_grpc.KvCacheStub(channel).Step(iter([kv_cache_pb2.AttendRequest()]))),
}


@pytest.mark.parametrize("kind", CALLS)
async def test_rl07_new_calls_on_new_connections_get_draining_while_streams_end(kind):
    async with generating(slow_decoder()) as served, AsyncClient(served.address) as client:
        prompt = list(make_prompt(20))
        stream = client.generate(token_ids=prompt, max_tokens=100)
        chunks = [await anext(stream)]
        async with draining(served, PATIENCE):
            assert await status_of(served.address, CALLS[kind]) == (grpc.StatusCode.UNAVAILABLE, ["DRAINING"])
            chunks += await collect(stream)
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected_tokens(prompt, 100)
    assert chunks[-1].finish_reason == "length"


async def test_rl07_health_of_a_new_connection_says_not_serving_while_streams_end():
    async with generating(slow_decoder()) as served, AsyncClient(served.address) as client:
        stream = client.generate("abc", max_tokens=100)
        await anext(stream)
        async with draining(served, PATIENCE), grpc.aio.insecure_channel(served.address) as channel:
            for name in ("", "pagedkv.v1.KvCache", "pagedkv.v1.Generation"):
                stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest(service=name)
                assert (await stub.Check(request)).status == NOT_SERVING
                assert [answer.status async for answer in stub.Watch(request)] == [NOT_SERVING]
            await collect(stream)


def is_full(stats):
    return (stats.num_running, stats.num_waiting) == (4, 4)


async def test_rl07_streams_cut_off_get_their_text_and_that_they_were_cancelled():
    """Some run, some wait for a place in the batch; each ends well."""
    async with generating(slow_decoder(), limits={"max_num_seqs": 4}) as served:
        async with AsyncClient(served.address) as client:
            prompts = [list(make_prompt(20, seed)) for seed in range(8)]
            streams = [client.generate(token_ids=prompt, max_tokens=10_000) for prompt in prompts]
            reading = [asyncio.ensure_future(collect(stream)) for stream in streams]
            await until(lambda: is_full(served.engine.stats), "requests that run and that wait")
            async with draining(served, 0.05):
                ended = await asyncio.wait_for(asyncio.gather(*reading), PATIENCE)
    for prompt, chunks in zip(prompts, ended, strict=True):
        found = [token_id for chunk in chunks for token_id in chunk.token_ids]
        assert chunks[-1].finish_reason == "cancelled"
        assert found == expected_tokens(prompt, len(found))
    assert not served.cache.sequence_ids()


async def test_rl07_a_cut_streams_text_is_whole_although_it_might_have_begun_a_stop_string():
    decoder = ScriptedDecoder(
        forced(3, [*b"text, ", *(b"e" * 200 + b"x") * 45]), before_step=slow_decoder().before_step
    )
    async with generating(decoder) as served, AsyncClient(served.address) as client:
        stream = client.generate("abc", max_tokens=9_000, stop=["e" * 256])
        chunks = [await anext(stream)]
        async with draining(served, 0.1):
            chunks += await asyncio.wait_for(collect(stream), PATIENCE)
    text, token_ids = "".join(chunk.text for chunk in chunks), [t for chunk in chunks for t in chunk.token_ids]
    assert chunks[-1].finish_reason == "cancelled"
    assert text == bytes(token_ids).decode()


async def test_rl07_a_step_stream_goes_on_in_the_grace_and_then_ends_with_draining():
    async with serving() as served, AsyncClient(served.address) as client:
        await client.allocate("a")
        await client.append("a", *make_rows(3), layer=0)
        async with grpc.aio.insecure_channel(served.address) as channel:
            call = kv_cache_pb2_grpc.KvCacheStub(channel).Step()
            await call.write(make_attend_request(["a"], make_queries(1), layer=0))
            assert (await call.read()).output.data
            async with draining(served, 100 * PATIENCE):
                await call.write(make_attend_request(["a"], make_queries(1), layer=0))
                assert (await call.read()).output.data
                served.server.hurry()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await asyncio.wait_for(call.read(), PATIENCE)
        infos = [error_details_pb2.ErrorInfo.FromString(d.value) for d in rpc_status.from_call(caught.value).details]
    assert (caught.value.code(), infos[0].reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_rl07_a_hurry_ends_the_grace():
    async with generating(slow_decoder()) as served, AsyncClient(served.address) as client:
        stream = client.generate("abc", max_tokens=10_000)
        await anext(stream)
        async with draining(served, 100 * PATIENCE):
            served.server.hurry()
            assert (await collect(stream))[-1].finish_reason == "cancelled"


async def test_a_server_without_calls_is_closed_at_once():
    async with serving() as served, AsyncClient(served.address) as client:
        await client.usage()
        await asyncio.wait_for(served.server.stop(100 * PATIENCE), PATIENCE)
        with pytest.raises(errors.TransportError):
            await client.allocate("a")


@pytest.mark.parametrize("kind", CALLS)
async def test_nc15_a_listener_without_a_service_says_that_it_is_starting(kind):
    listener = make_listener(ServerConfig(port=0))
    await listener.start()
    try:
        assert await status_of(listener.address, CALLS[kind]) == (grpc.StatusCode.UNAVAILABLE, ["STARTING"])
        async with grpc.aio.insecure_channel(listener.address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == NOT_SERVING
    finally:
        await listener.close()
