"""A client's life: made, shared by threads, interrupted, closed while calls run, forked."""

import asyncio
import multiprocessing
import os
import signal
import socket
import threading

import grpc
import numpy as np
import pytest

from helpers.generation_server import generating, slow_decoder
from helpers.server import serving
from helpers.waiting import until
from helpers.wire import make_queries, make_rows
from pagedkv.client import AsyncClient, Client
from pagedkv.client.answers import to_cache_info, to_chunk
from pagedkv.errors import InvalidArgument, TransportError
from pagedkv.v1 import generation_pb2, kv_cache_pb2


@pytest.fixture
def silent_server():
    """An address that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def outcome(call):
    """Start a call in a thread; returns the thread and where its exception will be."""
    found = []

    def run():
        try:
            call()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_closing_a_client_ends_the_calls_of_other_threads(silent_server):
    client = Client(silent_server)
    calls = [outcome(call) for call in (client.usage, lambda: list(client.generate("a")))]
    client.close()
    for thread, found in calls:
        thread.join(60)
        assert not thread.is_alive()
        assert [type(error) for error in found] == [TransportError]
        assert found[0].code == "CANCELLED"


async def test_closing_a_client_ends_the_calls_of_other_tasks_without_cancelling_them(silent_server):
    client = AsyncClient(silent_server)
    step = client.step()
    calls = (client.usage(), anext(client.generate("a")), step.attend("a", make_queries(1), layer=0))
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.sleep(0)
    await client.close()
    for error in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60):
        assert isinstance(error, TransportError)
        assert error.code == "CANCELLED"


async def test_cancelling_a_task_cancels_its_call_and_is_no_error_of_ours(silent_server):
    async with AsyncClient(silent_server) as client:
        task = asyncio.ensure_future(client.usage())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def interrupted(call):
    """Make a call that Ctrl-C reaches while it waits."""
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    return call()


def test_interrupted_wait_cancels_its_call(silent_server):
    with Client(silent_server) as client:
        with pytest.raises(KeyboardInterrupt):
            interrupted(client.usage)
        asyncio.run(until(lambda: not asyncio.all_tasks(client._loop), "end of the call"))


@pytest.mark.parametrize("call", [lambda c: c.usage(), lambda c: c.step(), lambda c: list(c.generate("a"))])
def test_closed_client_says_so(call):
    client = Client("127.0.0.1:1")
    client.close()
    client.close()
    with pytest.raises(TransportError, match="the client is closed"):
        call(client)


async def test_closed_asyncio_client_says_so():
    client = AsyncClient("127.0.0.1:1")
    await client.close()
    await client.close()
    for call in (client.usage, lambda: anext(client.generate("a"))):
        with pytest.raises(TransportError, match="the client is closed"):
            await call()
    with pytest.raises(TransportError, match="the client is closed"):
        client.step()


def outlive(address):
    client = Client(address)
    stream, step = client.generate("a", max_tokens=1000), client.step()
    next(stream)
    client.close()
    stream.close()
    step.close()


async def test_streams_that_outlive_their_client_close_in_silence():
    async with generating(slow_decoder()) as served:
        await asyncio.to_thread(outlive, served.address)


def test_client_that_cannot_be_made_leaves_no_thread():
    before = threading.active_count()
    with pytest.raises(InvalidArgument):
        Client("127.0.0.1:1", timeout="soon")
    assert threading.active_count() == before


def test_asyncio_client_without_a_loop_names_what_to_use_instead():
    with pytest.raises(RuntimeError, match=r"running asyncio event loop.*trio, use pagedkv\.client\.Client"):
        AsyncClient("127.0.0.1:1")


async def test_step_of_a_closed_client_ends_with_its_code():
    async with serving() as served:
        client = AsyncClient(served.address)
        await client.allocate("a")
        step = client.step()
        await client.close()
        with pytest.raises(TransportError, match="CANCELLED"):
            await step.attend(["a"], make_queries(1), layer=0)


def test_what_a_newer_server_says_is_no_raw_error():
    chunk = to_chunk(generation_pb2.GenerateResponse(text="a", finish_reason=77))
    assert (chunk.text, chunk.finish_reason) == ("a", "other")
    with pytest.raises(TransportError, match="data type 77 is not known here"):
        to_cache_info(kv_cache_pb2.GetCacheInfoResponse(data_type=77))


def _use(client, queue):
    try:
        client.usage()
    except RuntimeError as error:
        queue.put(str(error))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_child_of_a_fork_is_refused_instead_of_waiting_for_ever():
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    with Client("127.0.0.1:1") as client:
        child = fork.Process(target=_use, args=(client, queue))
        child.start()
        child.join(60)
        assert "forked" in queue.get()


async def test_attends_of_one_step_at_the_same_time_get_each_its_own_answer():
    async with serving() as served, AsyncClient(served.address) as client:
        await client.allocate("a")
        await client.append("a", *make_rows(5), layer=0)
        queries = [make_queries(1, seed) for seed in range(20)]
        expected = [(await client.attend("a", each, layer=0)).output for each in queries]
        async with client.step() as step:
            found = await asyncio.gather(*(step.attend("a", each, layer=0) for each in queries))
    assert np.array_equal([each.output for each in found], expected)


async def test_attend_that_is_cut_off_ends_the_step_so_that_no_answer_comes_to_another():
    async with serving() as served, AsyncClient(served.address) as client:
        await client.allocate("a")
        await client.append("a", *make_rows(5), layer=0)
        async with client.step() as step:
            await step.attend("a", make_queries(1), layer=0)
            cut = asyncio.ensure_future(step.attend("a", make_queries(1), layer=0))
            await asyncio.sleep(0)
            cut.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cut
            with pytest.raises(TransportError, match="CANCELLED"):
                await step.attend("a", make_queries(1, 1), layer=0)


async def test_step_closed_by_another_task_ends_an_attend_without_cancelling_its_task(silent_server):
    async with AsyncClient(silent_server) as client:
        step = client.step()
        waiting = asyncio.ensure_future(step.attend("a", make_queries(1), layer=0))
        await asyncio.sleep(0)
        await step.close()
        with pytest.raises(TransportError, match="CANCELLED"):
            await waiting


@pytest.mark.parametrize("call", [lambda c: c.usage(), lambda c: anext(c.generate("a"))], ids=["unary", "stream"])
async def test_call_that_the_server_cancels_is_an_error_and_cancels_no_task(call):
    async def refuse(request, context):
        await context.abort(grpc.StatusCode.CANCELLED, "stopping")

    class Handler(grpc.GenericRpcHandler):
        def service(self, details):
            if details.method.endswith("Generate"):
                return grpc.unary_stream_rpc_method_handler(refuse)
            return grpc.unary_unary_rpc_method_handler(refuse)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers([Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(TransportError, match="CANCELLED"):
                await call(client)
    finally:
        await server.stop(0)
