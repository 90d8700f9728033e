"""The server around the services: failures, size limits, health, reflection, drain."""

import asyncio
import contextlib
import threading

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from helpers.generation_server import expected_tokens, generating, slow_decoder
from helpers.scripted_engine import make_prompt
from helpers.server import SHAPE, serving
from helpers.waiting import PATIENCE, until
from helpers.wire import assert_attention, make_queries, make_rows
from pagedkv import errors
from pagedkv.client import AsyncClient
from pagedkv.client.requests import make_attend_request
from pagedkv.rpc.health import HealthService
from pagedkv.rpc.server import Server, ServerConfig, _channel_options
from pagedkv.v1 import kv_cache_pb2, kv_cache_pb2_grpc

on_each_backend = pytest.mark.usefixtures("backend")

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@contextlib.asynccontextmanager
async def running(**options):
    async with serving(**options) as served, AsyncClient(served.address, timeout=PATIENCE) as client:
        yield served, client


def raising(error):
    def call(*args, **kwargs):
        raise error

    return call


async def collect(stream):
    return [chunk async for chunk in stream]


async def is_serving(address, service=""):
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(channel).Check(request)).status == SERVING


@on_each_backend
async def test_cancel_inside_a_handler_gives_a_status_gr_04(monkeypatch):
    async with generating() as served, AsyncClient(served.address) as client:
        monkeypatch.setattr(served.cache, "usage", raising(asyncio.CancelledError()))
        with pytest.raises(errors.PagedKvError, match="internal error"):
            await asyncio.wait_for(client.usage(), PATIENCE)


@on_each_backend
async def test_cancel_inside_a_stream_gives_a_status_gr_04(monkeypatch):
    async with generating() as served, AsyncClient(served.address) as client:
        monkeypatch.setattr("pagedkv.engine.stream.GenerationStream.__anext__", raising(asyncio.CancelledError()))
        with pytest.raises(errors.PagedKvError, match="internal error"):
            await asyncio.wait_for(collect(client.generate("a")), PATIENCE)
        await until(lambda: not served.cache.sequence_ids(), "end of the request")


@on_each_backend
async def test_unknown_exception_becomes_internal_without_its_text(monkeypatch, caplog):
    async with running() as (served, client), grpc.aio.insecure_channel(served.address) as channel:
        monkeypatch.setattr(served.cache, "usage", raising(ValueError("the secret")))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await kv_cache_pb2_grpc.KvCacheStub(channel).GetUsage(kv_cache_pb2.GetUsageRequest())
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in str(caught.value.trailing_metadata()) + caught.value.details()
        infos = [error_details_pb2.ErrorInfo.FromString(d.value) for d in rpc_status.from_call(caught.value).details]
        assert [(info.domain, info.reason) for info in infos] == [("pagedkv", "INTERNAL")]
        error_id = caught.value.details().split()[2].rstrip(";")
        assert error_id in caplog.text
        assert "the secret" in caplog.text
        assert (await client.audit()).ok


@on_each_backend
async def test_a_lost_device_answers_nothing_from_then_on(monkeypatch):
    async with running() as (served, client):
        await client.allocate("a")
        await client.append("a", *make_rows(3), layer=0)
        assert await is_serving(served.address)
        monkeypatch.setattr(served.backend, "attend", raising(errors.DeviceLost("the card fell out")))
        for _ in range(2):
            with pytest.raises(errors.DeviceLost):
                await client.attend(["a"], make_queries(1), layer=0)
        monkeypatch.undo()
        with pytest.raises(errors.DeviceLost):
            await client.append("a", *make_rows(3), layer=0)
        assert not await is_serving(served.address)
        assert (await client.audit()).ok


@on_each_backend
@pytest.mark.parametrize("error", [errors.DeviceError("no memory for it"), RuntimeError("a mistake of ours")])
async def test_rl06_a_job_that_fails_takes_back_what_it_should_have_written_and_ends_nobody_else(monkeypatch, error):
    async with running() as (served, client):
        keys, values = make_rows(20)
        await client.allocate("a", token_ids=list(range(40)))
        await client.append("a", keys, values, layer=0)
        before = served.cache.sequence("a")
        monkeypatch.setattr(served.backend, "write_kv", raising(error))
        for call in (
            client.append("a", *make_rows(20), layer=0),
            client.attend(["a"], make_queries(20), layer=0, query_lens=[20], keys=keys, values=values),
        ):
            with pytest.raises(errors.PagedKvError):
                await call
            assert served.cache.sequence("a").layer_lengths == before.layer_lengths
        assert await is_serving(served.address)
        monkeypatch.undo()
        assert await client.append("a", *make_rows(20), layer=0, position=20) == 40
        assert (await client.audit()).ok


@on_each_backend
async def test_rl06_calls_that_share_a_launch_fail_alone(monkeypatch):
    async with running() as (served, client):
        keys, values = make_rows(3)
        for name in ("good", "bad"):
            await client.allocate(name)
            await client.append(name, keys, values, layer=0)
        attend, gate = served.backend.attend, threading.Event()

        def fail_for_the_bad(layer, queries, batch, params):
            if (np.diff(batch.query_starts) == 2).any():
                raise errors.DeviceError("no memory for it")
            return attend(layer, queries, batch, params)

        monkeypatch.setattr(served.backend, "attend", fail_for_the_bad)
        served.backend.submit(gate.wait)  # so that both come while the device is busy
        first = asyncio.ensure_future(client.attend(["good"], make_queries(1), layer=0))
        await until(lambda: served.server._kv_cache._batcher._is_busy, "a launch")
        calls = [
            client.attend([name], make_queries(n), layer=0, query_lens=[n]) for name, n in (("good", 1), ("bad", 2))
        ]
        together = asyncio.gather(*calls, return_exceptions=True)
        await until(lambda: len(served.server._kv_cache._batcher._waiting) == 2, "two calls that wait")
        gate.set()
        good, bad = await together
        assert_attention(good, make_queries(1), [keys], [values], [1])
        assert_attention(await first, make_queries(1), [keys], [values], [1])
        assert isinstance(bad, errors.DeviceError)
        assert await is_serving(served.address)


@on_each_backend
async def test_messages_of_5_mib_go_both_ways_gr_01():
    num_rows = 5 * 2**20 // (SHAPE.num_heads * SHAPE.head_dim * 4)
    async with running(num_blocks=num_rows // 16) as (_, client):
        keys, values = make_rows(num_rows)
        queries = make_queries(num_rows)
        await client.allocate("a")
        await client.append("a", keys, values, layer=0)
        result = await client.attend(["a"], queries, layer=0, query_lens=[num_rows], window=4)
        assert result.output.nbytes == queries.nbytes == 5 * 2**20
        tail = await client.attend(["a"], queries[-8:], layer=0, query_lens=[8], window=4)
        np.testing.assert_allclose(result.output[-8:], tail.output, rtol=1e-5, atol=1e-6)
        assert_attention(tail, queries[-8:], [keys], [values], [8], window=4)


@on_each_backend
async def test_message_above_the_limit_is_refused_and_the_connection_stays_usable_gr_01():
    async with running(max_message_bytes=2**20) as (_, client):
        await client.allocate("a")
        for num_tokens in (1_024, 5_000):  # a Tensor of 1,024 rows is 1 MiB, and so its request is just above
            with pytest.raises(errors.TransportError) as caught:
                await client.append("a", *make_rows(num_tokens), layer=0)
            assert caught.value.code == "RESOURCE_EXHAUSTED"
            assert (await client.sequence("a")).block_table == ()
        assert await client.append("a", *make_rows(900), layer=0) == 900


def test_pings_of_quiet_clients_are_allowed_by_the_server_gr_07():
    options = dict(_channel_options(ServerConfig(max_message_bytes=2**21)))
    assert options["grpc.http2.min_ping_interval_without_data_ms"] <= 10_000
    assert options["grpc.keepalive_permit_without_calls"] == 1
    assert options["grpc.max_receive_message_length"] == options["grpc.max_send_message_length"] == 2**21


@on_each_backend
async def test_many_health_watches_block_nobody_gr_09():
    async with generating() as served, AsyncClient(served.address) as client:
        async with grpc.aio.insecure_channel(served.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(90)]
            assert {(await watch.read()).status for watch in watches} == {SERVING}
            await asyncio.wait_for(client.allocate("a"), PATIENCE)
            chunks = await asyncio.wait_for(collect(client.generate("abc", max_tokens=4)), PATIENCE)
            assert chunks[-1].num_output_tokens == 4
            for watch in watches:
                watch.cancel()


@on_each_backend
async def test_health_knows_each_service_that_is_served():
    async with running() as (served, _):
        assert await is_serving(served.address)
        assert await is_serving(served.address, "pagedkv.v1.KvCache")
        with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
            await is_serving(served.address, "pagedkv.v1.Generation")
    async with generating() as served:
        assert await is_serving(served.address, "pagedkv.v1.Generation")


@on_each_backend
async def test_reflection_lists_the_services():
    async with running() as (served, _), grpc.aio.insecure_channel(served.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {service.name for service in (await call.read()).list_services_response.service}
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol="pagedkv.v1.Tensor"))
        assert (await call.read()).file_descriptor_response.file_descriptor_proto
        await call.done_writing()
    assert listed == {
        "pagedkv.v1.KvCache",
        "pagedkv.v1.Generation",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }


@on_each_backend
async def test_drain_lets_a_running_stream_end_and_reports_not_serving():
    async with generating(slow_decoder()) as served, AsyncClient(served.address) as client:
        async with grpc.aio.insecure_channel(served.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            prompt = list(make_prompt(20))
            stream = client.generate(token_ids=prompt, max_tokens=100)
            chunks = [await anext(stream)]
            stopping = asyncio.ensure_future(served.server.stop(20))
            assert (await asyncio.wait_for(watch.read(), PATIENCE)).status == NOT_SERVING
            watch.cancel()
            with pytest.raises(errors.Draining):
                await client.allocate("late")
            chunks += await collect(stream)
            await asyncio.wait_for(stopping, PATIENCE)
        assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected_tokens(prompt, 100)
        assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize("service", ["", "pagedkv.v1.KvCache", "pagedkv.v1.Generation", "unheard.of"])
async def test_stop_tells_health_watches_and_waits_for_none_of_them(service):
    """A grace far beyond the test's patience: who waits it out for an open watch fails."""
    async with running() as (served, _), grpc.aio.insecure_channel(served.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
        told = aiter(watch)
        first = (await anext(told)).status
        await asyncio.wait_for(served.server.stop(10 * PATIENCE), PATIENCE)
        rest = [response.status async for response in told]
        assert await watch.code() is grpc.StatusCode.OK
        is_served = service in ("", "pagedkv.v1.KvCache")
        assert first == (SERVING if is_served else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        assert rest == ([NOT_SERVING] if is_served else [])


async def test_health_watch_hears_of_every_change_and_check_knows_no_other_service():
    health, heard = HealthService(), []
    watch = health.Watch(health_pb2.HealthCheckRequest(service="a"), None)
    heard.append((await anext(watch)).status)
    for status in (SERVING, NOT_SERVING, SERVING):
        health.set("a", status)
        heard.append((await anext(watch)).status)
    health.stop()
    health.set("a", SERVING)
    heard += [response.status async for response in watch]
    assert heard == [health_pb2.HealthCheckResponse.SERVICE_UNKNOWN, SERVING, NOT_SERVING, SERVING, NOT_SERVING]


@on_each_backend
async def test_half_closed_step_gets_all_its_answers_gr_14():
    async with running() as (served, client), grpc.aio.insecure_channel(served.address) as channel:
        await client.allocate("a")
        keys, values = make_rows(50)
        call = kv_cache_pb2_grpc.KvCacheStub(channel).Step()
        for at in range(50):
            rows = {"keys": keys[at, None], "values": values[at, None], "positions": [at]}
            await call.write(make_attend_request(["a"], make_queries(1, at), layer=0, **rows))
        await call.done_writing()
        answers = 0
        while (await call.read()) is not grpc.aio.EOF:
            answers += 1
            await asyncio.sleep(0.001)
        assert answers == 50
        assert await call.code() is grpc.StatusCode.OK


@on_each_backend
async def test_port_in_use_is_refused():
    async with running() as (served, _):
        second = Server(ServerConfig(port=served.server.port), cache=served.cache, backend=served.backend)
        with pytest.raises(errors.InvalidArgument) as caught:
            await second.start()
        assert caught.value.field == "port"
        await second.stop(0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.com"])
def test_open_address_needs_a_word(host):
    with pytest.raises(errors.InvalidArgument, match="insecure"):
        ServerConfig(host=host)
    assert ServerConfig(host=host, insecure=True).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_loopback_address_needs_none(host):
    assert ServerConfig(host=host).host == host
