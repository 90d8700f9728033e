"""Many callers at once, some of whom go in the middle: each one's attention is exact, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random

import numpy as np
import pytest

from helpers.server import SHAPE, serving
from helpers.waiting import PATIENCE
from helpers.wire import assert_attention, make_queries, make_rows
from pagedkv.client import AsyncClient
from pagedkv.errors import OutOfBlocks, OutOfHostBlocks, SequenceSwapped

LAYERS, MOST_SEQUENCES = SHAPE.num_layers, 6


class Caller:
    """Calls at random on sequences of its own, and knows what each must hold: K and V [LAYERS, tokens, ...]."""

    def __init__(self, client, name, seed):
        self.client, self.name, self.random = client, name, random.Random(seed)
        self.held: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.num_made = 0

    async def run(self, num_calls):
        calls = [
            self.append,
            self.append,
            self.attend,
            self.attend,
            self.fork,
            self.swap,
            self.free,
            self.go,
            self.audit,
        ]
        for _ in range(num_calls):
            if not self.held or (len(self.held) < MOST_SEQUENCES and self.random.random() < 0.2):
                await self.start()
                continue
            with contextlib.suppress(OutOfBlocks, OutOfHostBlocks, SequenceSwapped):
                await self.random.choice(calls)(self.random.choice(list(self.held)))
        if self.held:
            await self.client.free(list(self.held))

    def new_name(self):
        self.num_made += 1
        return f"{self.name}-{self.num_made}"

    def rows(self, num_tokens):
        return make_rows(num_tokens, self.random.randrange(2**31), num_layers=LAYERS)

    async def start(self):
        name = self.new_name()
        await self.client.allocate(name)
        self.held[name] = self.rows(0)

    async def append(self, name):
        rows = self.rows(self.random.randint(1, 20))
        await self.client.append(name, *rows)
        self.held[name] = tuple(np.concatenate(pair, axis=1) for pair in zip(self.held[name], rows, strict=True))

    async def attend(self, name):
        names = sorted({name, self.random.choice(list(self.held))})
        keys, values = ([self.held[each][side] for each in names] for side in (0, 1))
        lens = [self.random.randint(0, min(3, rows.shape[1])) for rows in keys]
        queries, layer = make_queries(sum(lens), self.random.randrange(99)), self.random.randrange(LAYERS)
        result = await self.client.attend(names, queries, layer=layer, query_lens=lens)
        assert_attention(result, queries, [rows[layer] for rows in keys], [rows[layer] for rows in values], lens)

    async def fork(self, name):
        if len(self.held) < MOST_SEQUENCES:
            child = self.new_name()
            await self.client.fork(name, child)
            self.held[child] = self.held[name]

    async def swap(self, name):
        await (self.client.swap_out if self.random.random() < 0.4 else self.client.swap_in)(name)

    async def free(self, name):
        await self.client.free(name)
        del self.held[name]

    async def go(self, name):
        """Leave a call that writes before its answer, at any moment; whether it wrote is not known then."""
        keys, values = make_rows(2, 1)
        options = {"layer": 0, "query_lens": [2], "keys": keys, "values": values}
        call = asyncio.ensure_future(self.client.attend([name], make_queries(2), **options))
        for _ in range(self.random.randrange(12)):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await self.free(name)

    async def audit(self, name):
        found = await self.client.audit()
        assert found.ok, found.findings


@pytest.mark.parametrize("seed", range(3))
async def test_callers_at_once_get_exact_answers_and_leave_nothing(backend, seed):
    num_calls = 80 if backend == "cpu" else 12
    async with serving(num_blocks=40, block_size=8, num_host_blocks=16) as served:
        async with AsyncClient(served.address, timeout=PATIENCE) as client:
            await asyncio.gather(*(Caller(client, f"c{at}", 100 * seed + at).run(num_calls) for at in range(6)))
            audit, usage = await client.audit(), await client.usage()
            assert audit.ok, audit.findings
            assert (usage.free + usage.cached, usage.host_free) == (40, 16)
            assert await client.sequences() == []
