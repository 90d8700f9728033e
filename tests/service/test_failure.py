"""What is final makes /health fail, on the CPU as well: whoever supervises the process starts another."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request

import pytest

from helpers.tiny_models import make_tiny_model
from helpers.waiting import PATIENCE, until
from helpers.whole_service import whole_service
from pagedkv.errors import DeviceLost


def end_the_devices_thread(service):
    service.backend._queue._entries.put(None)


def end_the_engines_loop(service):
    service.engine._task.cancel()


def status(url):
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("failure", [end_the_devices_thread, end_the_engines_loop])
async def test_rl06_what_is_final_ends_the_streams_and_fails_health_and_readiness(tmp_path, failure):
    async with whole_service(make_tiny_model(tmp_path), "cpu", metrics_port=0) as running:
        stream = running.client.generate("Hello", max_tokens=900, ignore_eos=True)
        await anext(stream)
        assert await asyncio.to_thread(status, f"{running.service.metrics_url}/health") == 200
        failure(running.service)
        with pytest.raises(DeviceLost):
            await asyncio.wait_for(collect(stream), PATIENCE)
        await until(lambda: not running.service.server.is_healthy, "failure")
        for path in ("health", "ready"):
            assert await asyncio.to_thread(status, f"{running.service.metrics_url}/{path}") == 503
        with pytest.raises(DeviceLost):
            await running.client.allocate("a")


async def collect(stream):
    return [chunk async for chunk in stream]
