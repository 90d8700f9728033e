"""How long a sequence may be is judged before what is free: the answer names the limit, not the pool."""

from __future__ import annotations

import pytest

from helpers.server import SHAPE, serving
from helpers.waiting import PATIENCE
from helpers.wire import make_queries, make_rows
from pagedkv import errors
from pagedkv.client import AsyncClient

pytestmark = pytest.mark.usefixtures("backend")


async def append(client, count):
    await client.append("a", *make_rows(count), layer=0)


async def append_all(client, count):
    rows = make_rows(SHAPE.num_layers * count)
    await client.append("a", *(part.reshape(SHAPE.num_layers, count, *part.shape[1:]) for part in rows))


async def attend(client, count):
    keys, values = make_rows(count)
    await client.attend(["a"], make_queries(count), layer=0, query_lens=[count], keys=keys, values=values)


async def allocate(client, count):
    await client.allocate("b", list(range(count)))


@pytest.mark.parametrize("limited", [{"num_blocks": 32}, {"num_blocks": 34, "max_sequence_tokens": 512}])
@pytest.mark.parametrize("call", [append, append_all, attend, allocate])
async def test_sd15_600_tokens_where_512_are_allowed_are_too_many_by_name(call, limited):
    async with serving(**limited) as served, AsyncClient(served.address, timeout=PATIENCE) as client:
        await client.allocate("a")
        with pytest.raises(errors.SequenceTooLong) as caught:
            await call(client, 600)
        assert (caught.value.num_tokens, caught.value.limit) == (600, 512)
        assert (await client.usage()).free == limited["num_blocks"]
        assert (await client.sequence("a")).num_tokens == 0
