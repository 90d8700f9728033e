"""One running service with a tiny model and a mixed load, for Prometheus and the browser to look at."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading

import numpy as np
import pytest

from helpers.process import ServiceProcess
from helpers.tiny_models import make_tiny_model
from pagedkv.client import AsyncClient
from pagedkv.errors import OutOfBlocks, PagedKvError

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 2, 2, 64


def need(*programs):
    """Skip where a program of Debian's is missing."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: apt-get install prometheus chromium chromium-driver")


@pytest.fixture(scope="session")
def service(tmp_path_factory):
    model = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    with ServiceProcess("serve", str(model), "--blocks", "160", "--swap-blocks", "160") as running:
        yield running


def keys_and_values(num_tokens):
    shape = (NUM_LAYERS, num_tokens, NUM_KV_HEADS, HEAD_DIM)
    return np.ones(shape, np.float32), np.ones(shape, np.float32)


class MixedLoad:
    """Streams, cancels, forks, swaps, truncates, frees and errs in a thread of its own until the block ends.

    With `crowd`, four long generations that do not fit the pool together run beside it once: one is preempted; and a
    sequence lies in host memory all the time.
    """

    def __init__(self, address, crowd=False):
        self._address, self._crowd = address, crowd
        self.rounds = 0
        self.failure = None

    def __enter__(self):
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(120)
        assert not self._thread.is_alive()
        if self.failure:
            raise self.failure

    async def _run(self):
        try:
            async with AsyncClient(self._address) as client, asyncio.TaskGroup() as beside:
                numbers = range(4) if self._crowd else ()
                if self._crowd:
                    await self._use_cache(client)  # while there is room
                    await self._park(client)
                crowd = [beside.create_task(self._generate_long(client, number)) for number in numbers]
                while not self._stop.is_set():
                    await asyncio.gather(self._generate(client), self._cancel(client), self._use_cache(client))
                    self.rounds += 1
                for task in crowd:
                    task.cancel()
                if self._crowd:
                    await client.free("parked")
        except Exception as error:
            self.failure = error

    async def _generate(self, client):
        options = {"token_ids": [5, 6, 7] * 20, "max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
        async for _ in client.generate(**options):
            pass

    async def _generate_long(self, client, number):
        async for _ in client.generate(token_ids=[9 + number] * 30, max_tokens=700, ignore_eos=True):
            pass

    async def _cancel(self, client):
        stream = client.generate("Hello world", max_tokens=400, temperature=0.0, ignore_eos=True)
        await anext(stream)
        await stream.aclose()

    async def _use_cache(self, client):
        name = f"load-{self.rounds}"
        with contextlib.suppress(OutOfBlocks):  # as long as the crowd holds the pool
            await self._use_sequence(client, name)
        left = [sequence.sequence_id for sequence in await client.sequences()]
        await client.free([sequence_id for sequence_id in left if sequence_id.startswith(name)])
        with contextlib.suppress(PagedKvError):
            await client.sequence("gone")

    async def _park(self, client):
        await client.allocate("parked")
        await client.append("parked", *keys_and_values(20))
        await client.swap_out("parked")

    async def _use_sequence(self, client, name):
        await client.allocate(name, list(range(40)))
        length = (await client.sequence(name)).num_tokens
        keys, values = keys_and_values(40 - length)
        await client.append(name, keys, values, token_ids=list(range(length, 40)))
        await client.fork(name, name + "/fork")
        await client.append(name + "/fork", *keys_and_values(3))
        await client.swap_out([name, name + "/fork"])
        await asyncio.sleep(0.05)
        await client.swap_in([name, name + "/fork"])
        await client.truncate(name, 10)
