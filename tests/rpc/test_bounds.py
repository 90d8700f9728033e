"""What all clients together may have: bytes and streams under way, sequences, remembered answers, answers' sizes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading

import grpc
import ml_dtypes
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st

from helpers.generation_server import generating
from helpers.server import SHAPE, serving
from helpers.waiting import PATIENCE, until
from helpers.wire import make_queries, make_rows
from pagedkv.client import AsyncClient
from pagedkv.client.asynchronous import make_attend_request
from pagedkv.client.failure import to_exception
from pagedkv.config import KvShape
from pagedkv.dtypes import DType
from pagedkv.errors import InvalidArgument, QuotaExceeded, SequenceExists
from pagedkv.rpc.admission import CALL_BYTES, BytesInFlight, ReceivingTurns
from pagedkv.rpc.freed_memory import FreedMemory
from pagedkv.rpc.reflection import V1ALPHA
from pagedkv.rpc.retries import RetryMemory
from pagedkv.rpc.server import ServerConfig
from pagedkv.v1 import generation_pb2, kv_cache_pb2, kv_cache_pb2_grpc

on_each_backend = pytest.mark.usefixtures("backend")
MIB = 2**20
REFLECT = f"/{V1ALPHA}/ServerReflectionInfo"
WIDE = KvShape(num_layers=1, num_heads=8, num_kv_heads=1, head_dim=64)  # answers much larger than requests


@contextlib.asynccontextmanager
async def running(**options):
    async with serving(**options) as served, AsyncClient(served.address, timeout=PATIENCE) as client:
        yield served, client


@contextlib.contextmanager
def held_device(served):
    """Keep the device busy until the block ends."""
    release = threading.Event()
    served.backend.submit(lambda: release.wait(PATIENCE))
    try:
        yield
    finally:
        release.set()


def retry_seconds(error):
    infos = [error_details_pb2.RetryInfo() for _ in error.details]
    return [info.retry_delay.seconds for detail, info in zip(error.details, infos, strict=True) if detail.Unpack(info)]


# -- RL-03: bytes in flight -------------------------------------------------------------------------------------------


async def test_rl03_calls_beyond_the_bytes_in_flight_are_refused_and_small_ones_of_others_go_on():
    async with running(num_blocks=256, max_message_bytes=MIB, max_inflight_bytes=4 * MIB) as (served, client):
        await client.allocate("a")
        await client.append("a", *make_rows(500), layer=0)
        queries = make_queries(500)  # half a MiB
        with held_device(served):
            calls = [
                asyncio.ensure_future(client.attend(["a"], queries, layer=0, query_lens=[500], window=1))
                for _ in range(50)
            ]
            await until(lambda: sum(call.done() for call in calls) >= 43, "refusals")
            assert (await client.usage()).total == 256
            await client.allocate("b")
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, QuotaExceeded)]
        assert len(refused) == 44
        assert refused[0].field == "max_inflight_bytes"
        assert refused[0].limit == 4 * MIB * 7 // 8
        await client.attend(["a"], queries, layer=0, query_lens=[500], window=1)


async def test_rl03_refusal_by_a_quota_says_when_to_retry():
    async with running(max_sequences=1) as (served, client):
        await client.allocate("a")
        async with grpc.aio.insecure_channel(served.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await kv_cache_pb2_grpc.KvCacheStub(channel).Allocate(kv_cache_pb2.AllocateRequest(sequence_id="b"))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_seconds(rpc_status.from_call(caught.value)) == [1]


async def test_bytes_in_flight_come_back_however_a_call_ends(monkeypatch):
    taken = []
    monkeypatch.setattr(BytesInFlight, "__init__", noting(BytesInFlight.__init__, taken))
    async with running() as (served, client):
        in_flight = taken[-1]  # the first is of the time before anything is served
        await client.allocate("a")
        await client.append("a", *make_rows(16), layer=0)
        with pytest.raises(SequenceExists):
            await client.allocate("a")
        with pytest.raises(InvalidArgument):
            await client.attend(["a"], make_queries(1), layer=99)
        with held_device(served):
            cancelled = asyncio.ensure_future(client.attend(["a"], make_queries(1), layer=0))
            await until(lambda: in_flight.num_bytes, "call")
            cancelled.cancel()
            await until(lambda: in_flight.num_bytes == 0, "end of the call")
            async with client.step() as step:
                stepping = asyncio.ensure_future(step.attend(["a"], make_queries(1), layer=0))
                await until(lambda: in_flight.num_bytes > CALL_BYTES, "message")
                stepping.cancel()
        await until(lambda: in_flight.num_bytes == 0, "end of all calls")
        async with client.step() as step:
            for _ in range(3):
                await step.attend(["a"], make_queries(1), layer=0)
            await until(lambda: in_flight.num_bytes == 0, "end of the message")


def noting(init, made):
    def note(self, *args):
        init(self, *args)
        made.append(self)

    return note


async def test_stream_waits_for_room_instead_of_ending():
    in_flight = BytesInFlight(10 * MIB)
    held = [in_flight.take(2 * MIB) for _ in range(4)]
    with pytest.raises(QuotaExceeded):
        in_flight.take(2 * MIB)
    waiting = asyncio.ensure_future(in_flight.room_for(2 * MIB))
    in_flight.give_back(held.pop())
    await asyncio.wait_for(waiting, PATIENCE)
    await asyncio.wait_for(in_flight.room_for(2 * MIB), PATIENCE)
    for num_bytes in held:
        in_flight.give_back(num_bytes)
    assert in_flight.num_bytes == 0


async def test_rl03_one_connection_has_eight_messages_received_at_a_time_and_another_is_not_concerned():
    reading, gate = [], asyncio.Event()

    class Call:
        def __init__(self, peer):
            self.peer = lambda: peer

        async def read(self):
            reading.append(self.peer())
            await gate.wait()
            return b"message"

    turns = ReceivingTurns(8)
    calls = [asyncio.ensure_future(turns.receive(Call(peer))) for peer in ["a"] * 20 + ["b"] * 3]
    await until(lambda: len(reading) == 11, "messages")
    assert (reading.count("a"), reading.count("b")) == (8, 3)
    calls[0].cancel()
    await until(lambda: len(reading) == 12, "the next in turn")
    gate.set()
    assert await asyncio.gather(*calls[1:]) == [b"message"] * 22
    assert reading.count("a") == 20


async def test_rl03_memory_of_large_messages_is_given_back_once_it_is_much_or_after_a_while():
    trims = []
    freed, later = (FreedMemory(lambda _: trims.append(None) or 1, seconds) for seconds in (3_600, 0))
    freed.note(255 * MIB)
    await asyncio.sleep(0)
    assert not trims
    freed.note(MIB)
    await until(lambda: len(trims) == 1, "a trim at once")
    later.note(7 * MIB)
    later.note(MIB)
    await until(lambda: len(trims) == 2, "a trim after a while")
    FreedMemory(None).note(2**40)


# -- RL-03: sequences and streams -------------------------------------------------------------------------------------


@on_each_backend
async def test_rl03_sequences_beyond_the_limit_are_refused_and_ended_ones_make_room():
    async with running(max_sequences=3) as (_, client):
        for name in "abc":
            await client.allocate(name)
        for make in (client.allocate("d"), client.fork("a", "d")):
            with pytest.raises(QuotaExceeded) as caught:
                await make
            assert (caught.value.field, caught.value.limit, caught.value.value) == ("max_sequences", 3, 4)
        await client.free("b")
        await client.fork("a", "d")
        assert [found.sequence_id for found in await client.sequences()] == ["a", "c", "d"]


@on_each_backend
async def test_rl03_token_ids_and_tables_of_sequences_that_write_nothing_are_bounded():
    async with running(max_known_tokens=1_000) as (_, client):
        await client.allocate("a", list(range(600)))
        with pytest.raises(QuotaExceeded) as caught:
            await client.allocate("b", list(range(401)))
        assert (caught.value.field, caught.value.limit, caught.value.value) == ("max_known_tokens", 1_000, 1_001)
        await client.allocate("b", list(range(100)))
        await client.append("b", *make_rows(80, num_layers=SHAPE.num_layers))
        for at in range(3):
            await client.fork("b", f"fork-{at}")
        with pytest.raises(QuotaExceeded):
            await client.fork("b", "fork-3")
        await client.free("a")
        await client.fork("b", "fork-3")


@pytest.mark.parametrize("field", ["max_sequences", "max_known_tokens", "max_watches", "max_connections"])
def test_bounds_of_nothing_are_refused(field):
    with pytest.raises(InvalidArgument) as caught:
        ServerConfig(**{field: 0})
    assert caught.value.field == field


def test_bytes_in_flight_have_room_for_a_message():
    with pytest.raises(InvalidArgument) as caught:
        ServerConfig(max_message_bytes=MIB, max_inflight_bytes=MIB)
    assert caught.value.field == "max_inflight_bytes"


async def test_rl03_watches_and_reflection_streams_beyond_the_limit_are_refused():
    watch = "/grpc.health.v1.Health/Watch"
    async with running(max_watches=3) as (served, client):
        async with grpc.aio.insecure_channel(served.address) as channel:
            held = [channel.unary_stream(watch)(b"") for _ in range(3)]
            for call in held:
                await call.read()
            for more in (channel.unary_stream(watch)(b""), channel.stream_stream(REFLECT)(iter([b""]))):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await more.read()
                assert to_exception(caught.value).field == "max_watches"
            assert (await client.usage()).total == 64
            held.pop().cancel()
            await client.usage()
            assert await channel.unary_stream(watch)(b"").read()


async def test_rl03_connections_beyond_the_limit_are_refused_and_the_others_go_on():
    async with running(max_connections=4) as (served, client):
        await client.usage()
        held = [await asyncio.open_connection("127.0.0.1", served.server.port) for _ in range(20)]
        closed = await asyncio.wait_for(first_closed([reader for reader, _ in held], 17), PATIENCE)
        assert closed == 17
        assert (await client.usage()).total == 64
        for _, writer in held:
            writer.close()


async def first_closed(readers, count):
    """Read until so many connections have ended; a server begins by telling its settings."""

    async def drained(reader):
        with contextlib.suppress(ConnectionError):
            await reader.read()

    tasks = [asyncio.ensure_future(drained(reader)) for reader in readers]
    await until(lambda: sum(task.done() for task in tasks) >= count, "closed connections")
    num_closed = sum(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return num_closed


# -- RL-05: failed means unchanged ------------------------------------------------------------------------------------


@on_each_backend
async def test_rl05_attend_whose_answer_would_be_too_large_writes_nothing():
    async with running(shape=WIDE, num_blocks=64, max_message_bytes=MIB) as (_, client):
        await client.allocate("a")
        count = 512  # queries of bfloat16 make the request half as large as its answer
        rng = np.random.default_rng(0)
        queries = rng.standard_normal((count, 8, 64)).astype(np.float16)
        rows = rng.standard_normal((count, 1, 64)).astype(np.float16)
        before = await client.sequence("a"), await client.usage()
        async with client.step() as step:
            for call in (client.attend, step.attend):
                with pytest.raises(InvalidArgument) as caught:
                    await call(["a"], queries, layer=0, query_lens=[count], keys=rows, values=rows)
                assert caught.value.field == "queries.shape"
                assert caught.value.limit == MIB
        assert (await client.sequence("a"), await client.usage()) == before
        fewer = count - 10
        options = {"query_lens": [fewer], "keys": rows[:fewer], "values": rows[:fewer]}
        result = await client.attend(["a"], queries[:fewer], layer=0, **options)
        assert MIB * 0.97 < result.output.nbytes + result.lse.nbytes < MIB


async def test_rl05_list_of_sequences_ends_a_page_before_it_gets_too_large():
    async with running(max_message_bytes=MIB) as (served, client):
        names = [f"{at:04}" + "\U0001f600" * 252 for at in range(1_200)]
        for name in names:
            served.cache.allocate(name)
        assert [found.sequence_id for found in await client.sequences()] == names


async def test_rl05_sequence_whose_table_is_too_large_for_a_message_is_refused_with_the_limit(monkeypatch):
    async with running(max_message_bytes=MIB) as (served, client):
        await client.allocate("a")
        view = served.cache.sequence("a")
        huge = type(view)(**{name: getattr(view, name) for name in view.__slots__} | {"block_table": (1,) * 2**20})
        monkeypatch.setattr(served.cache, "sequence", lambda name: huge)
        with pytest.raises(InvalidArgument) as caught:
            await client.sequence("a")
        assert caught.value.limit == MIB


# -- RL-01: what the pool's own type cannot hold ----------------------------------------------------------------------


@on_each_backend
@pytest.mark.parametrize(("dtype", "value"), [(DType.FLOAT16, 65_520.0), (DType.BFLOAT16, 3.4e38)])
async def test_rl01_rows_beyond_the_pools_type_are_refused_and_others_arrive_finite(dtype, value):
    shape = KvShape(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=64, dtype=dtype)
    async with running(shape=shape, block_size=8) as (served, client):
        await client.allocate("a")
        rows = np.zeros((2, 1, 64), np.float32)
        rows[1, 0, 3] = value
        for field in ("keys", "values"):
            given = {"keys": np.zeros_like(rows), "values": np.zeros_like(rows), field: rows}
            with pytest.raises(InvalidArgument) as caught:
                await client.append("a", given["keys"], given["values"], layer=0)
            assert caught.value.field == f"{field}.data"
        assert (await client.sequence("a")).block_table == ()
        rows[1, 0, 3] = value * 0.99
        await client.append("a", np.zeros_like(rows), rows, layer=0)
        (block,) = (await client.sequence("a")).block_table
        stored = served.backend.submit(lambda: served.backend.read_block(block)).result()
        numpy_type = np.float16 if dtype is DType.FLOAT16 else ml_dtypes.bfloat16
        held = stored.view(numpy_type).astype(np.float32)  # slots that nobody wrote may hold anything
        assert np.isclose(np.nanmax(held), value * 0.99, rtol=0.01)


# -- RL-10: bytes that are no message ---------------------------------------------------------------------------------

METHODS = [
    (f"/{service.full_name}/{method.name}", method.client_streaming)
    for file in (kv_cache_pb2, generation_pb2, health_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
] + [(REFLECT, True)]


async def call_raw(channel, method, is_stream, data):
    """Send bytes as the request of any method; a client that streams can call one that does not, on the wire."""
    call = channel.stream_stream(method)(iter([data])) if is_stream else channel.unary_stream(method)(data)
    async for _ in call:
        pass


@pytest.mark.parametrize(("method", "is_stream"), METHODS)
async def test_rl10_bytes_that_are_no_message_are_refused_with_one_log_line_at_most(method, is_stream, caplog):
    junk = random.Random(method)
    async with generating() as served, grpc.aio.insecure_channel(served.address) as channel:
        for size in (1, 7, 100, 5_000, 100_000):
            data = b"\xff" + junk.randbytes(size)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(call_raw(channel, method, is_stream, data), PATIENCE)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            error = to_exception(caught.value)
            assert type(error) is InvalidArgument
            assert error.field == "request"
        assert served.cache.audit().ok
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_rl10_bytes_that_are_no_message_end_a_step_after_the_answers_before_them():
    async with running() as (served, client), grpc.aio.insecure_channel(served.address) as channel:
        await client.allocate("a")
        await client.append("a", *make_rows(1), layer=0)
        good = make_attend_request(["a"], make_queries(1), layer=0).SerializeToString()
        call = channel.stream_stream("/pagedkv.v1.KvCache/Step")(iter([good, b"\xff\xff"]))
        assert kv_cache_pb2.AttendResponse.FromString(await call.read()).output.data
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert type(to_exception(caught.value)) is InvalidArgument


# -- RL-13: remembered answers ----------------------------------------------------------------------------------------


@on_each_backend
async def test_rl13_answer_is_forgotten_with_the_sequence_that_the_call_made():
    async with running() as (_, client):
        await client.allocate("a", request_id="r")
        await client.allocate("a", request_id="r")
        await client.free("a")
        await client.allocate("a", request_id="r")
        assert [found.sequence_id for found in await client.sequences()] == ["a"]
        await client.fork("a", "b", request_id="f")
        await client.free("b")
        await client.fork("a", "b", request_id="f")
        assert [found.sequence_id for found in await client.sequences()] == ["a", "b"]
        await client.free(["a", "b"])
        await client.allocate("a")
        with pytest.raises(SequenceExists):
            await client.allocate("a", request_id="r")


@on_each_backend
async def test_rl13_answer_about_tokens_that_were_given_back_is_forgotten():
    async with running() as (_, client):
        await client.allocate("a", list(range(40)))
        await client.append("a", *make_rows(40, num_layers=SHAPE.num_layers))
        assert (await client.allocate("b", list(range(40)), request_id="r")).num_cached_tokens == 32
        assert await client.fork("a", "c", request_id="f") == 40
        await client.truncate("b", 32)
        assert (await client.allocate("b", list(range(40)), request_id="r")).num_cached_tokens == 32
        await client.truncate("b", 31)
        await client.truncate("c", 39)
        for retry in (client.allocate("b", list(range(40)), request_id="r"), client.fork("a", "c", request_id="f")):
            with pytest.raises(SequenceExists):
                await retry


def allocated(name, token_ids=()):
    return kv_cache_pb2.AllocateRequest(sequence_id=name, token_ids=token_ids)


def remember(memory, number):
    name, answer = f"s{number}", kv_cache_pb2.AllocateResponse(cached_token_count=number)
    memory.remember(f"r{number}", allocated(name), answer, sequence_id=name, num_tokens=0)


def test_rl03_remembered_answers_are_bounded_in_number_bytes_and_time():
    now = [0.0]
    by_number, by_bytes = RetryMemory(max_answers=10), RetryMemory(max_bytes=10_000)
    by_time = RetryMemory(max_seconds=10, clock=lambda: now[0])
    for number in range(100):
        for memory in (by_number, by_bytes, by_time):
            remember(memory, number)
        now[0] += 1
    assert (len(by_number), len(by_time)) == (10, 10)
    assert 10 <= len(by_bytes) <= 16
    assert by_bytes.num_bytes <= 10_000
    assert by_number.find("r89", allocated("s89")) is None
    assert by_number.find("r90", allocated("s90")).cached_token_count == 90
    now[0] += 100
    assert by_time.find("r99", allocated("s99")) is None
    assert (len(by_time), by_time.num_bytes) == (0, 0)


@given(st.lists(st.tuples(st.sampled_from(["make", "free", "cut"]), st.integers(0, 5), st.integers(0, 3))))
def test_rl13_memory_never_tells_of_a_sequence_that_is_not_as_it_was_made(steps):
    memory, made = RetryMemory(max_answers=3), {}
    for what, name, number in steps:
        request, request_id = allocated(str(name), [number]), f"{name}-{number}"
        if what == "make":
            known = memory.find(request_id, request)
            assert known is None or made[name] == number
            answer = kv_cache_pb2.AllocateResponse(cached_token_count=number)
            if name not in made:
                memory.remember(request_id, request, answer, sequence_id=str(name), num_tokens=number)
                made[name] = number
        elif what == "free":
            memory.note_freed([str(name)])
            made.pop(name, None)
        elif made.get(name, 0) > number:
            memory.note_truncated(str(name), number)
            made[name] = -1
    assert len(memory) <= 3
