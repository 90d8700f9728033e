"""Streams of the cache service: how many there may be, and what long ones hold."""

import asyncio
import contextlib
import gc
import logging
import threading

import grpc
import psutil
import pytest

from helpers.server import serving
from helpers.waiting import PATIENCE, until
from helpers.wire import make_queries, make_rows
from pagedkv.client import AsyncClient
from pagedkv.client.requests import make_attend_request
from pagedkv.errors import InvalidArgument, QuotaExceeded
from pagedkv.rpc.server import ServerConfig
from pagedkv.v1 import kv_cache_pb2_grpc

on_each_backend = pytest.mark.usefixtures("backend")


@contextlib.asynccontextmanager
async def running(**options):
    """Yield a client of a server with a sequence "a" of 16 tokens in layer 0."""
    async with serving(**options) as served, AsyncClient(served.address, timeout=PATIENCE) as client:
        await client.allocate("a")
        await client.append("a", *make_rows(16), layer=0)
        await client.attend(["a"], make_queries(1), layer=0)  # whatever the first one compiles
        yield client


@on_each_backend
async def test_streams_beyond_the_limit_are_refused_at_once_and_others_go_on_gr_10():
    async with running(max_streams=3) as client:
        steps = [client.step() for _ in range(20)]
        answers = await asyncio.wait_for(
            asyncio.gather(*(step.attend(["a"], make_queries(1), layer=0) for step in steps), return_exceptions=True),
            10,
        )
        refused = [answer for answer in answers if isinstance(answer, QuotaExceeded)]
        assert len(refused) == 17
        assert refused[0].limit == 3
        kept = [step for step, answer in zip(steps, answers, strict=True) if not isinstance(answer, QuotaExceeded)]
        for step in kept:
            await step.attend(["a"], make_queries(1), layer=0)
            await step.close()
        assert (await client.audit()).ok


@on_each_backend
async def test_ended_stream_makes_room_for_another_gr_10():
    async with running(max_streams=1) as client:
        for _ in range(5):
            async with client.step() as step:
                await step.attend(["a"], make_queries(1), layer=0)
            await client.usage()  # the server has seen the cancellation by the time it answers


@on_each_backend
async def test_calls_are_answered_while_an_audit_runs_and_what_it_finds_is_repaired(monkeypatch):
    async with serving() as served, AsyncClient(served.address, timeout=PATIENCE) as client:
        begin, begun, go_on = served.cache.begin_audit, [], threading.Event()

        def held_up():
            check = begin()
            begun.append(check)
            return lambda: go_on.wait(PATIENCE) and check()

        monkeypatch.setattr(served.cache, "begin_audit", held_up)
        audits = [asyncio.ensure_future(client.audit()) for _ in range(3)]
        await until(lambda: begun, "audit")
        await client.allocate("a")
        await client.append("a", *make_rows(16), layer=0)
        assert len(begun) == 1  # the others wait: one copy at a time
        go_on.set()
        assert [audit.ok for audit in await asyncio.gather(*audits)] == [True] * 3
        served.cache.ledger.num_tokens += 1
        assert [(await client.audit()).ok for _ in range(2)] == [False, True]


@on_each_backend
async def test_step_whose_requests_end_by_an_error_shows_whole_appends_only_gr_13():
    """The client fails after some of its requests: each is written whole or not at all, and the call fails."""
    async with serving() as served, AsyncClient(served.address, timeout=PATIENCE) as client:
        async with grpc.aio.insecure_channel(served.address) as channel:
            stub = kv_cache_pb2_grpc.KvCacheStub(channel)
            for number in range(20):
                name, keys_values = f"a{number}", make_rows(3, number)
                await client.allocate(name)

                async def requests(count, name=name, rows=keys_values):
                    for at in range(count):
                        options = {"query_lens": [3], "positions": [3 * at], "keys": rows[0], "values": rows[1]}
                        yield make_attend_request([name], make_queries(3), layer=0, **options)
                    raise RuntimeError("the client is ill")

                call = stub.Step(requests(number % 6))
                with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                    async for _ in call:
                        pass
                assert await call.code() is not grpc.StatusCode.OK
                assert (await client.sequence(name)).layer_lengths[0] in range(0, 3 * (number % 6) + 1, 3)
            assert (await client.audit()).ok


def test_no_streams_at_all_is_refused():
    with pytest.raises(InvalidArgument) as caught:
        ServerConfig(max_streams=0)
    assert caught.value.field == "max_streams"


async def test_long_stream_keeps_no_message_gr_18(backend):
    """Messages of 16 KiB each way; the kept ones would be 64 MiB, on the slow virtual GPU 8 MiB, in every round.

    Other memory of the process grows too, but not in each of three rounds.
    """
    count = 2_000 if backend == "cpu" else 250
    async with running() as client, client.step() as step:
        queries, process = make_queries(16), psutil.Process()

        async def send(count):
            for _ in range(count):
                await step.attend(["a"], queries, layer=0, query_lens=[16], window=1)
            gc.collect()
            return process.memory_info().rss

        before = await send(count // 10)
        for _ in range(3):
            after = await send(count)
            grown, before = after - before, after
            if grown < count * 10 * 2**10:
                return
        raise AssertionError(f"{grown} bytes more after {count} messages, for the third time")


@on_each_backend
async def test_each_call_is_logged_with_its_status_and_time(caplog):
    async with running() as client:
        with caplog.at_level(logging.DEBUG, logger="pagedkv.rpc.interceptors"):
            await client.usage()
    lines = [record.getMessage() for record in caplog.records if record.name == "pagedkv.rpc.interceptors"]
    assert any(line.startswith("KvCache/GetUsage OK after ") for line in lines)
