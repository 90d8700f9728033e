"""Options of channels, on both sides: each is one that gRPC knows, and does what it is there for."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc

from helpers.server import serving
from helpers.waiting import PATIENCE
from helpers.wire import make_rows
from pagedkv import errors
from pagedkv.client import AsyncClient
from pagedkv.rpc.server import ServerConfig, _channel_options

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1


@pytest.fixture(scope="module")
def core():
    """The library's own bytes: it names every option that it reads."""
    return Path(cygrpc.__file__).read_bytes()


def client_options(monkeypatch):
    given = []
    make = grpc.aio.insecure_channel
    monkeypatch.setattr(grpc.aio, "insecure_channel", lambda *args, options: given.extend(options) or make(*args))
    AsyncClient("127.0.0.1:1")
    return given


async def test_gr08_every_option_is_one_that_grpc_knows(core, monkeypatch):
    options = [*_channel_options(ServerConfig()), *client_options(monkeypatch)]
    assert len(options) > 8
    assert [name for name, _ in options if name.encode() + b"\0" not in core] == []
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms" not in core


def frame(kind, flags=0, payload=b""):
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, 0) + payload


class Pinger:
    """An HTTP/2 client that can do nothing but ping."""

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        self.writer.transport.abort()

    @classmethod
    async def connect(cls, port):
        self = cls()
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        self.writer.write(PREFACE + frame(SETTINGS))
        return self

    async def ping(self):
        """Return whether a ping is answered; False once the server says goodbye."""
        self.writer.write(frame(PING, payload=b"anything"))
        while True:
            head = await asyncio.wait_for(self.reader.readexactly(9), PATIENCE)
            payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == GOAWAY:
                assert payload.endswith(b"too_many_pings")
                return False
            if head[3] == PING and head[4] == ACK:
                return True


async def test_gr08_pings_of_an_idle_client_are_answered_as_often_as_the_server_allows():
    """15 at more than the allowed interval: two that come too early already would end the connection."""
    async with serving(min_ping_interval_ms=50) as served, await Pinger.connect(served.server.port) as client:
        for _ in range(15):
            await asyncio.sleep(0.1)
            assert await client.ping()


async def test_gr08_pings_that_come_too_often_end_the_connection():
    async with serving(min_ping_interval_ms=600_000) as served, await Pinger.connect(served.server.port) as client:
        answers = [await client.ping() for _ in range(3)]
        while answers[-1] and len(answers) < 10:
            answers.append(await client.ping())
        assert answers[0]
        assert not answers[-1]


async def test_gr08_connection_of_a_client_that_pings_while_idle_stays_and_takes_its_next_call():
    """gRPC pings once a second at most; a third ping too early would end the connection."""
    options = [
        ("grpc.keepalive_time_ms", 1_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with serving(min_ping_interval_ms=300) as served:
        async with grpc.aio.insecure_channel(served.address, options=options) as channel:
            usage = channel.unary_unary("/pagedkv.v1.KvCache/GetUsage")
            await usage(b"")
            left = asyncio.ensure_future(channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
            await asyncio.wait([left], timeout=5.5)
            assert not left.done()
            assert await usage(b"")
            left.cancel()


@pytest.mark.parametrize("side", ["client", "server"])
async def test_message_above_the_limit_of_either_side_is_refused_by_that_side(side):
    small, large = 2**20, 2**23
    limits = {"client": large, "server": large, side: small}
    async with serving(max_message_bytes=limits["server"]) as served:
        async with AsyncClient(served.address, timeout=PATIENCE, max_message_bytes=limits["client"]) as client:
            await client.allocate("a")
            with pytest.raises(errors.TransportError) as caught:
                await client.append("a", *make_rows(3_000), layer=0)
            assert caught.value.code == "RESOURCE_EXHAUSTED"
            assert ("Sent message" if side == "client" else "message larger") in str(caught.value)
            assert await client.append("a", *make_rows(900), layer=0) == 900


@pytest.mark.parametrize(
    ("call", "num_tries"), [(lambda client: client.usage(), 3), (lambda client: client.allocate("a"), 1)]
)
async def test_service_config_of_the_client_repeats_only_what_is_safe_to_repeat(call, num_tries):
    tries = []

    class Flaky(grpc.GenericRpcHandler):
        def service(self, details):
            return grpc.unary_unary_rpc_method_handler(self.answer)

        async def answer(self, request, context):
            tries.append(request)
            if len(tries) < num_tries or num_tries == 1:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
            return b""

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Flaky(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}", timeout=PATIENCE) as client:
        with contextlib.nullcontext() if num_tries > 1 else pytest.raises(errors.TransportError):
            await call(client)
    await server.stop(0)
    assert len(tries) == num_tries
