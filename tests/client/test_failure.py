"""What goes wrong on the way says what it is and what to do, in a line, instead of what gRPC says."""

import asyncio
import contextlib
import re
import socket
from types import SimpleNamespace

import grpc
import pytest

from helpers.server import serving
from helpers.waiting import PATIENCE
from pagedkv.client import AsyncClient
from pagedkv.client.failure import to_exception
from pagedkv.errors import TransportError


@contextlib.asynccontextmanager
async def answering(reply):
    """A server that answers whatever it gets with these bytes, and closes; yields its address."""

    async def answer(reader, writer):
        await reader.read(1)
        writer.write(reply)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def failure(target, call=lambda client: client.allocate("a"), **options):
    """Return the error of a call, which has one line of bounded length and names the target."""
    async with AsyncClient(target, **options) as client:
        with pytest.raises(TransportError) as caught:
            await asyncio.wait_for(call(client), PATIENCE)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 250
    return caught.value


async def test_nobody_at_the_address_says_how_to_start_a_service():
    error = await failure("127.0.0.1:1")
    assert str(error) == "UNAVAILABLE: no service at 127.0.0.1:1; start one with `pagedkv serve`"


async def test_no_socket_at_the_path_says_how_to_start_a_service(tmp_path):
    error = await failure(f"unix:{tmp_path}/s")
    assert error.message.endswith("; start one with `pagedkv serve`")


async def test_port_that_speaks_http_is_called_the_metrics_port():
    async with answering(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") as address:
        error = await failure(address)
    assert f"{address} answers HTTP/1, not gRPC: that is the metrics port" in str(error)


async def test_server_that_speaks_something_else_is_named():
    async with answering(b"\0" * 100) as address:
        assert address in str(await failure(address))


async def test_time_that_is_up_is_said_with_who_did_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        error = await failure(address, timeout=0.2)
    assert str(error) == f"DEADLINE_EXCEEDED: {address} gave no answer in time"


async def test_message_over_the_servers_limit_names_both_sizes():
    async with serving(max_message_bytes=2**20) as served:
        error = await failure(served.address, lambda client: client.allocate("a" * 2**20))
    assert error.code == "RESOURCE_EXHAUSTED"
    assert re.search(r"message larger than the server's limit: \d+ bytes, limit 1048576$", error.message)


async def test_server_of_another_kind_does_not_know_the_call():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        error = await failure(f"127.0.0.1:{port}")
    finally:
        await server.stop(0)
    assert error.code == "UNIMPLEMENTED"
    assert f"127.0.0.1:{port} does not know this call" in error.message


async def test_errors_of_streams_have_the_same_hints():
    for call in (lambda client: anext(client.generate("a")), lambda client: _step(client)):
        error = await failure("127.0.0.1:1", call)
        assert "start one with `pagedkv serve`" in error.message


async def _step(client):
    async with client.step() as step:
        await step.attend("a", [[[0.0]]], layer=0)


def said(text, code=grpc.StatusCode.UNAVAILABLE):
    """Stand for a failed call of which gRPC says this."""
    return SimpleNamespace(code=lambda: code, details=lambda: text, trailing_metadata=lambda: ())


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("errors resolving kv.test:5: [field:hostname lookup error:Domain name not found]", "the host of kv.test:5"),
        ("DNS resolution failed for kv.test:5: C-ares status is not ARES_SUCCESS", "the host of kv.test:5"),
        ("failed to connect to all addresses; last error: UNKNOWN: ipv4:10.9.8.7:5: No route to host", "be reached"),
        ("Stream removed (ping timeout)", "kv.test:5 went silent"),
        ("Socket closed", "the connection to kv.test:5 broke"),
        ("recvmsg:Connection reset by peer", "the connection to kv.test:5 broke"),
        ("Cancelling all calls", "the service at kv.test:5 was stopped"),
    ],
)
def test_meaning_of_what_grpc_says(text, meaning):
    assert meaning in str(to_exception(said(text), "kv.test:5"))


def test_what_is_not_known_is_shortened():
    assert len(str(to_exception(said("x" * 5_000)))) < 250
