"""A device that fails in the middle of service: nothing is answered from it any more, and health says so."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from helpers.tiny_models import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, make_tiny_model
from helpers.waiting import PATIENCE, until
from helpers.whole_service import whole_service
from pagedkv.errors import DeviceError
from virtual_gpu.driver import CUresult

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
ROWS = np.ones((3, NUM_KV_HEADS, HEAD_DIM), np.float32)
QUERIES = np.ones((1, NUM_HEADS, HEAD_DIM), np.float32)


def fault_in_a_kernel(running):
    """The page pool is gone: the next kernel that touches it faults, as on a real device some time after its launch."""
    running.is_to_fault = True
    running.driver.memory.free(running.service.backend.pool.pointer)


def refused_launch(running):
    """The driver refuses every launch of a kernel or a graph from now on."""
    for name in ("cuLaunchKernel", "cuGraphLaunch"):
        setattr(running.driver, name, lambda *args: (CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,))


async def attend(client):
    await client.attend(["a"], QUERIES, layer=0)


async def append(client):
    await client.append("a", ROWS, ROWS, layer=0)


async def generate(client):
    async for _ in client.generate("Hello", max_tokens=4):
        pass


CALLS = {
    "append": append,
    "attend": attend,
    "generate": generate,
    "allocate": lambda client: client.allocate("b"),
    "fork": lambda client: client.fork("a", "c"),
}


async def health(address):
    names = ("", "pagedkv.v1.KvCache", "pagedkv.v1.Generation")
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return {(await stub.Check(health_pb2.HealthCheckRequest(service=name))).status for name in names}


def get(url):
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


async def assert_answers_nothing(running):
    """Every call that needs the device is refused, without a launch; what describes the service still answers."""
    launches = running.driver.launch_number
    for name, call in CALLS.items():
        with pytest.raises(DeviceError) as caught:
            await asyncio.wait_for(call(running.client), PATIENCE)
        assert caught.value.reason == "DEVICE_LOST", name
    assert running.driver.launch_number == launches
    assert await health(running.service.address) == {NOT_SERVING}
    for path in ("health", "ready"):
        assert (await asyncio.to_thread(get, f"{running.service.metrics_url}/{path}"))[0] == 503
    metrics = (await asyncio.to_thread(get, f"{running.service.metrics_url}/metrics"))[1]
    assert "pagedkv_device_healthy 0.0" in metrics
    assert (await running.client.audit()).ok
    await running.client.free("a")


@pytest.mark.parametrize("failure", [fault_in_a_kernel, refused_launch])
@pytest.mark.parametrize("first", ["append", "attend", "generate"])
async def test_a_device_failure_met_by_any_call_is_the_answer_to_all_later_ones(tmp_path, failure, first):
    async with whole_service(make_tiny_model(tmp_path), "cuda", metrics_port=0) as running:
        await running.client.allocate("a")
        await append(running.client)
        await attend(running.client)
        await generate(running.client)
        assert await health(running.service.address) == {SERVING}
        failure(running)
        with pytest.raises(DeviceError, match=r"cu[A-Z]"):
            await CALLS[first](running.client)
        await assert_answers_nothing(running)


async def test_device_memory_that_ends_in_the_middle_of_service_says_what_to_lower(tmp_path):
    """A step that could not be computed left tokens committed but not written: nothing may be answered from them."""
    async with whole_service(make_tiny_model(tmp_path), "cuda", metrics_port=0) as running:
        await running.client.allocate("a")
        await generate(running.client)
        running.driver.cuMemAlloc = lambda size: (CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0)
        with pytest.raises(DeviceError, match="lower --memory or --max-batch-tokens") as caught:
            await collect(running.client.generate(token_ids=[7] * 300, max_tokens=4))
        assert int(caught.value.details["asked"]) > 0
        assert int(caught.value.details["free"]) > 0
        await assert_answers_nothing(running)


async def test_a_stream_in_the_middle_ends_with_the_error_and_so_do_the_waiting_ones(tmp_path):
    async with whole_service(make_tiny_model(tmp_path), "cuda", max_num_seqs=1, metrics_port=0) as running:
        await running.client.allocate("a")
        streams = [running.client.generate("Hello", max_tokens=500, ignore_eos=True) for _ in range(3)]
        await anext(streams[0])
        rest = [asyncio.ensure_future(collect(stream)) for stream in streams]
        await until(lambda: running.service.engine.stats.num_waiting == 2, "two requests that wait")
        fault_in_a_kernel(running)
        for error in await asyncio.wait_for(asyncio.gather(*rest, return_exceptions=True), PATIENCE):
            assert isinstance(error, DeviceError)
        await assert_answers_nothing(running)
        assert running.service.cache.sequence_ids() == []


async def collect(stream):
    return [chunk async for chunk in stream]


async def test_a_failed_service_stops_in_time(tmp_path):
    async with whole_service(make_tiny_model(tmp_path), "cuda") as running:
        fault_in_a_kernel(running)
        with pytest.raises(DeviceError):
            await generate(running.client)
        await asyncio.wait_for(running.service.stop(), PATIENCE)
