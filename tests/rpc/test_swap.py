"""Swapping over the wire: bytes come back, sharing too, and every refusal says why."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from helpers.server import SHAPE, Serving, serving, serving_in_thread
from helpers.waiting import PATIENCE
from helpers.wire import assert_attention, make_queries, make_rows
from pagedkv.client import AsyncClient
from pagedkv.errors import (
    DeviceError,
    InvalidArgument,
    OutOfBlocks,
    OutOfHostBlocks,
    SequenceNotFound,
    SequenceSwapped,
    SwapUnavailable,
)
from pagedkv.v1 import kv_cache_pb2, kv_cache_pb2_grpc

LAYERS = SHAPE.num_layers


@pytest.fixture(scope="module")
def served(backend: str) -> Iterator[Serving]:
    with serving_in_thread(num_blocks=16, num_host_blocks=12) as served:
        yield served


def fill(client: Any, name: str, num_tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rows = make_rows(num_tokens, seed, num_layers=LAYERS)
    client.allocate(name)
    client.append(name, *rows)
    return rows


def assert_attends(client: Any, name: str, keys: np.ndarray, values: np.ndarray) -> None:
    queries = make_queries(2)
    for layer in range(LAYERS):
        result = client.attend([name], queries, layer=layer, query_lens=[2])
        assert_attention(result, queries, [keys[layer]], [values[layer]], [2])


def test_a_swapped_sequence_comes_back_bit_for_bit_though_others_used_its_blocks(client, name):
    keys, values = fill(client, name, 50)
    out = client.swap_out(name)
    block_bytes = client.info().block_bytes
    assert (out.num_blocks, out.num_bytes, out.num_kept_blocks) == (4, 4 * block_bytes, 0)
    fill(client, name + "/other", 200, 1)
    with pytest.raises(OutOfBlocks):
        client.swap_in(name)
    client.truncate(name + "/other", 100)
    back = client.swap_in([name])
    assert (back.num_blocks, back.num_bytes) == (4, 4 * block_bytes)
    assert_attends(client, name, keys, values)


def test_sc16_forks_share_over_the_wire_after_a_swap(client, name):
    keys, values = fill(client, name, 48)
    client.fork(name, name + "/fork")
    more = [make_rows(5, seed, num_layers=LAYERS) for seed in (1, 2)]
    for sequence, rows in zip((name, name + "/fork"), more, strict=True):
        client.append(sequence, *rows)
    assert client.swap_out([name, name + "/fork"]).num_blocks == 5
    usage = client.usage()
    assert (usage.host_private, usage.host_shared, usage.host_free, usage.host_total) == (2, 3, 7, 12)
    assert (usage.num_swapped, usage.swapped_tokens, usage.free) == (2, 58, 16)
    client.swap_in([name, name + "/fork"])
    assert client.usage().shared == 3
    for sequence, rows in zip((name, name + "/fork"), more, strict=True):
        assert_attends(
            client, sequence, *(np.concatenate([a, b], axis=1) for a, b in zip((keys, values), rows, strict=True))
        )


def test_a_fork_that_goes_on_alone_writes_over_nothing_that_is_swapped(client, name):
    keys, values = fill(client, name, 20)
    client.fork(name, name + "/fork")
    client.swap_out(name)
    client.append(name + "/fork", *make_rows(4, 3, num_layers=LAYERS))
    client.truncate(name + "/fork", 17)
    client.append(name + "/fork", *make_rows(7, 4, num_layers=LAYERS))
    client.swap_in(name)
    assert_attends(client, name, keys, values)


def test_swaps_are_safe_to_repeat(client, name):
    fill(client, name, 20)
    assert client.swap_in(name).num_blocks == 0
    assert client.swap_out(name).num_blocks == 2
    assert client.swap_out(name).num_blocks == 0
    assert client.swap_in(name).num_blocks == 2
    assert client.swap_in(name).num_blocks == 0


def test_sequences_say_where_they_are(client, name):
    fill(client, name, 20)
    client.swap_out(name)
    sequence = client.sequence(name)
    assert (sequence.is_swapped, sequence.num_tokens, sequence.block_table) == (True, 20, ())
    assert len(sequence.host_block_table) == 2
    assert [found.is_swapped for found in client.sequences()] == [True]
    client.swap_in(name)
    assert not client.sequence(name).is_swapped
    assert client.info().num_host_blocks == 12


def test_a_swapped_sequence_refuses_every_call_that_needs_its_blocks(client, name):
    fill(client, name, 20)
    fill(client, name + "/there", 5)
    client.swap_out(name)
    before = client.usage()
    rows, layers = make_rows(1), make_rows(1, num_layers=LAYERS)
    calls = [
        lambda: client.append(name, *layers),
        lambda: client.fork(name, name + "/fork"),
        lambda: client.truncate(name, 3),
        lambda: client.attend([name], make_queries(1), layer=0),
        lambda: client.attend(
            [name + "/there", name], make_queries(1), layer=0, query_lens=[1, 0], keys=rows[0], values=rows[1]
        ),
    ]
    for call in calls:
        with pytest.raises(SequenceSwapped) as caught:
            call()
        assert caught.value.details["sequence_id"] == name
    assert client.usage() == before
    client.free(name)
    assert client.usage().host_free == 12


def test_a_refused_batch_moves_none_of_it(client, name):
    fill(client, name, 200)
    fill(client, name + "/b", 20)
    for names, error in [
        ([name, name + "/b"], OutOfHostBlocks),
        ([name + "/b", "gone"], SequenceNotFound),
        ([name + "/b", name + "/b"], InvalidArgument),
        ([], InvalidArgument),
        (["~gen-0"], InvalidArgument),
    ]:
        with pytest.raises(error):
            client.swap_out(names)
        assert client.usage().host_free == 12
        assert not any(sequence.is_swapped for sequence in client.sequences())


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        ("full", grpc.StatusCode.RESOURCE_EXHAUSTED, "OUT_OF_HOST_BLOCKS"),
        ("swapped", grpc.StatusCode.FAILED_PRECONDITION, "SEQUENCE_SWAPPED"),
    ],
)
def test_refusals_have_their_code_and_figures(client, served, name, error, code, reason):
    fill(client, name, 200)
    fill(client, name + "/b", 20)
    client.swap_out(name + "/b")
    with grpc.insecure_channel(served.address) as channel:
        stub = kv_cache_pb2_grpc.KvCacheStub(channel)
        calls = {
            "full": lambda: stub.SwapOut(kv_cache_pb2.SwapOutRequest(sequence_ids=[name])),
            "swapped": lambda: stub.Truncate(kv_cache_pb2.TruncateRequest(sequence_id=name + "/b")),
        }
        with pytest.raises(grpc.RpcError) as caught:
            calls[error]()
    info = error_details_pb2.ErrorInfo()
    assert rpc_status.from_call(caught.value).details[0].Unpack(info)
    assert (caught.value.code(), info.reason) == (code, reason)
    if error == "full":
        assert info.metadata == {"needed": "13", "free": "10", "total": "12"}
        assert "host blocks" in caught.value.details()


async def test_without_a_host_pool_the_answer_says_how_to_get_one():
    async with serving() as served, AsyncClient(served.address) as client:
        await client.allocate("a")
        with pytest.raises(SwapUnavailable, match="--swap-memory"):
            await client.swap_out("a")
        assert (await client.swap_in("a")).num_blocks == 0
        assert (await client.info()).num_host_blocks == 0


async def test_a_caller_that_goes_leaves_a_whole_swap_behind():
    async with serving(num_blocks=16, num_host_blocks=12) as served, AsyncClient(served.address) as client:
        keys, values = make_rows(50, num_layers=LAYERS)
        await client.allocate("a")
        await client.append("a", keys, values)
        call = asyncio.create_task(client.swap_out("a"))
        await asyncio.sleep(0.002)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await client.swap_out("a")
        await client.swap_in("a")
        queries = make_queries(2)
        result = await client.attend(["a"], queries, layer=1, query_lens=[2])
        assert_attention(result, queries, [keys[1]], [values[1]], [2])


async def test_a_swap_that_fails_on_the_device_is_a_device_error_for_good():
    async with serving(num_blocks=16, num_host_blocks=12) as served, AsyncClient(served.address) as client:
        await client.allocate("a")
        await client.append("a", *make_rows(5, num_layers=LAYERS))
        served.backend.swap_out = lambda pairs: 1 / 0
        with pytest.raises(DeviceError):
            await client.swap_out("a")
        with pytest.raises(DeviceError):
            await client.swap_in("a")


@pytest.mark.parametrize("method", ["swap_out", "swap_in"])
async def test_rl02_several_sequences_are_swapped_up_to_a_number_of_blocks_and_one_whatever_its_length(
    method, monkeypatch
):
    monkeypatch.setattr("pagedkv.rpc.kv_cache.MAX_SWAPPED_BLOCKS", 3)
    async with (
        serving(num_blocks=16, num_host_blocks=12) as served,
        AsyncClient(served.address, timeout=PATIENCE) as client,
    ):
        for name in "ab":
            await client.allocate(name)
            await client.append(name, *make_rows(32, num_layers=LAYERS))
        await client.append("b", *make_rows(32, num_layers=LAYERS))
        if method == "swap_in":
            await client.swap_out("a")
            await client.swap_out("b")
        before = await client.usage()
        with pytest.raises(InvalidArgument) as caught:
            await getattr(client, method)(["a", "b"])
        assert (caught.value.field, caught.value.value, caught.value.limit) == ("sequence_ids", 6, 3)
        assert await client.usage() == before
        assert (await getattr(client, method)("b")).num_blocks == 4
