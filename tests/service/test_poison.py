"""What one client writes under a prompt's token ids ends no other client's work (RL-01), on either backend."""

from __future__ import annotations

import asyncio
import urllib.request

import numpy as np
import pytest

from helpers.tiny_models import HEAD_DIM, NUM_KV_HEADS, make_tiny_model
from helpers.waiting import PATIENCE
from helpers.whole_service import whole_service
from pagedkv.errors import NumericalError

NUM_POISONED = {"cpu": 20, "cuda": 4}
NUM_STREAMS = {"cpu": 8, "cuda": 3}
NUM_TOKENS = {"cpu": 60, "cuda": 12}


def make_poison(service, seed):
    """Draw a prompt and rows for it that are finite, but whose scores are not."""
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(5, 250, 17).tolist()
    rows = np.full((service.layout.shape.num_layers, 16, NUM_KV_HEADS, HEAD_DIM), 3e38, np.float32)
    return token_ids, rows * rng.choice([-1, 1], rows.shape).astype(np.float32)


async def poison_and_ask(running, seed, salt):
    """Write bad rows under a prompt, go, and have another client ask for that prompt twice."""
    token_ids, rows = make_poison(running.service, seed)
    await running.client.allocate(f"bad-{seed}", token_ids=token_ids, salt=salt)
    await running.client.append(f"bad-{seed}", rows, rows, token_ids=token_ids[:16])
    await running.client.free(f"bad-{seed}")
    with pytest.raises(NumericalError):
        await collect(running.client.generate(token_ids=token_ids, max_tokens=4, salt=salt))
    return await collect(running.client.generate(token_ids=token_ids, max_tokens=4, salt=salt))


async def collect(stream):
    return [token_id async for chunk in stream for token_id in chunk.token_ids]


def start_streams(running, backend):
    return [
        asyncio.ensure_future(
            collect(running.client.generate(f"Tell {index}", max_tokens=NUM_TOKENS[backend], ignore_eos=True))
        )
        for index in range(NUM_STREAMS[backend])
    ]


def is_ready(running):
    with urllib.request.urlopen(f"{running.service.metrics_url}/ready", timeout=PATIENCE) as response:
        return response.status == 200


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
async def test_rl01_poisoned_prefixes_end_their_own_request_and_no_other(tmp_path, backend):
    async with whole_service(make_tiny_model(tmp_path), backend, metrics_port=0, blocks=128) as running:
        quiet = await asyncio.gather(*start_streams(running, backend))
        clean = await collect(running.client.generate(token_ids=make_poison(running.service, 0)[0], max_tokens=4))
        await asyncio.to_thread(running.service.cache.flush_prefix_cache)
        streams = start_streams(running, backend)
        for seed in range(NUM_POISONED[backend]):
            again = await poison_and_ask(running, seed, b"salt" if seed % 2 else None)
            assert seed or again == clean
            assert await asyncio.to_thread(is_ready, running)
        assert await asyncio.gather(*streams) == quiet
        assert (await running.client.audit()).ok
