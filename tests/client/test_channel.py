"""The client's connection: how soon it is back after an outage, and what each of its options does."""

import asyncio
import contextlib
import struct
from types import SimpleNamespace

import grpc
import pytest
from grpc._cython import cygrpc

from helpers.proxy import Network, passing_to
from helpers.server import serving
from helpers.waiting import PATIENCE, until
from pagedkv.client import AsyncClient, Client
from pagedkv.client.channel import channel_options
from pagedkv.errors import PagedKvError, TransportError
from pagedkv.v1 import kv_cache_pb2, kv_cache_pb2_grpc

USAGE = kv_cache_pb2.GetUsageRequest()


class Plain:
    """A client that says nothing to gRPC of reconnecting."""

    def __init__(self, target, options=()):
        self._channel = grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1), *options])
        self._stub = kv_cache_pb2_grpc.KvCacheStub(self._channel)

    async def usage(self):
        return await self._stub.GetUsage(USAGE)

    async def close(self):
        await self._channel.close()


class Threaded:
    """The blocking client, called in a thread."""

    def __init__(self, target):
        self._client = Client(target)

    async def usage(self):
        return await asyncio.to_thread(self._client.usage)

    async def allocate(self, name):
        return await asyncio.to_thread(self._client.allocate, name)

    async def close(self):
        await asyncio.to_thread(self._client.close)


both_faces = pytest.mark.parametrize("make", [AsyncClient, Threaded])


@contextlib.asynccontextmanager
async def closing(client):
    try:
        yield client
    finally:
        await client.close()


async def call_until_served(client):
    """Call every 50 ms, as in an outage, until a call succeeds."""
    while True:
        with contextlib.suppress(PagedKvError, grpc.aio.AioRpcError):
            return await client.usage()
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def calling(*clients):
    """Have the clients call until each is served; whatever calls at the end is cancelled."""
    calls = [asyncio.ensure_future(call_until_served(client)) for client in clients]
    try:
        yield calls
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


@contextlib.asynccontextmanager
async def two_networks():
    """A server behind two networks: one for the client, one for its control."""
    async with serving() as served, passing_to(served.address) as ours, passing_to(served.address) as plain:
        yield ours, plain


@pytest.mark.parametrize(("make", "num_tries", "num_ours"), [(AsyncClient, 5, 9), (Threaded, 4, 5)])
async def test_rl14_client_is_back_while_one_with_grpc_defaults_still_waits(make, num_tries, num_ours):
    """After its fifth try gRPC's default waits for over five seconds; ours tries at least every 1.2."""
    async with two_networks() as (ours, plain), closing(make(ours.address)) as client:
        async with closing(Plain(plain.address)) as control:
            await asyncio.gather(client.usage(), control.usage())
            for network in (ours, plain):
                network.turn(Network.DOWN)
            async with calling(client, control) as (served, _):
                await until(lambda: plain.attempts == 1 + num_tries, "last try of the default")
                assert ours.attempts >= 1 + num_ours
                for network in (ours, plain):
                    network.turn(Network.UP)
                await asyncio.wait_for(served, PATIENCE)
                assert plain.attempts == 1 + num_tries


async def test_first_tries_after_a_connection_breaks_come_sooner_than_by_default():
    async with two_networks() as (ours, plain), closing(AsyncClient(ours.address)) as client:
        async with closing(Plain(plain.address)) as control:
            await asyncio.gather(client.usage(), control.usage())
            for network in (ours, plain):
                network.turn(Network.DOWN)
            async with calling(client, control):
                await until(lambda: plain.attempts == 1 + 2, "second try of the default")
                assert ours.attempts >= 1 + 3


@both_faces
async def test_rl14_new_client_in_the_process_does_not_inherit_the_wait_of_an_old_one(make):
    async with serving() as served, passing_to(served.address) as proxy, closing(make(proxy.address)) as old:
        proxy.turn(Network.DOWN)
        async with calling(old):
            await until(lambda: proxy.attempts >= 4, "wait of the old client that has grown")
            proxy.turn(Network.UP)
            async with closing(make(proxy.address)) as new:
                await new.allocate("a")  # which is never repeated


async def test_server_that_takes_a_connection_and_says_nothing_is_tried_again_sooner_than_by_default():
    async with two_networks() as (ours, plain):
        for network in (ours, plain):
            network.turn(Network.SILENT)
        async with closing(AsyncClient(ours.address)) as client, closing(Plain(plain.address)) as control:
            async with calling(client, control):
                await until(lambda: ours.attempts == 2, "second try")
                assert plain.attempts == 1


async def test_connection_that_goes_silent_ends_a_call_that_would_wait_for_ever():
    async with serving() as served, passing_to(served.address) as proxy:
        options = channel_options(proxy.address, 2**20, silence_ms=500)
        async with closing(Plain(proxy.address, options)) as client:
            await client.usage()
            await asyncio.sleep(0.2)  # until no ping of that call is on its way, whose answer would be missed too
            proxy.turn(Network.SILENT)
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await asyncio.wait_for(client.usage(), PATIENCE / 2)


class NameServer(asyncio.DatagramProtocol):
    """Gives every name the address 127.0.0.1; `asked` holds the names of all queries for an address."""

    def __init__(self):
        self.asked = []

    def connection_made(self, transport):
        self._transport = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, query, peer):
        end = query.index(b"\0", 12) + 5
        answer = b""
        if query[end - 4 : end - 2] == b"\0\1":
            self.asked.append(query[13 : 13 + query[12]].decode())
            answer = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 0, 4) + bytes([127, 0, 0, 1])
        head = query[:2] + b"\x81\x80" + struct.pack(">HHHH", 1, bool(answer), 0, 0)
        self._transport.sendto(head + query[12:end] + answer, peer)


async def test_name_is_looked_up_again_during_an_outage_as_a_server_may_be_back_elsewhere():
    """gRPC's default asks once in 30 s."""
    transport, names = await asyncio.get_running_loop().create_datagram_endpoint(
        NameServer, local_addr=("127.0.0.1", 0)
    )
    with contextlib.closing(transport):
        ours, plain = (f"dns://127.0.0.1:{names.port}/{name}.test:1" for name in ("ours", "plain"))
        async with closing(AsyncClient(ours)) as client, closing(Plain(plain)) as control, calling(client, control):
            await until(lambda: names.asked.count("ours") == 3, "third question")
            assert names.asked.count("plain") == 1


@contextlib.asynccontextmanager
async def failing_server(num_failures):
    """A server whose every call fails so many times with UNAVAILABLE; yields its address and the calls."""
    seen = []

    class Handler(grpc.GenericRpcHandler):
        def service(self, details):
            return grpc.unary_unary_rpc_method_handler(answer)

    async def answer(request, context):
        seen.append(request)
        if len(seen) <= num_failures:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        return b""

    server = grpc.aio.server()
    server.add_generic_rpc_handlers([Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield SimpleNamespace(address=f"127.0.0.1:{port}", seen=seen)
    finally:
        await server.stop(0)


async def test_calls_that_may_be_repeated_are_and_others_never():
    async with failing_server(2) as server, AsyncClient(server.address) as client:
        await client.usage()
        assert len(server.seen) == 3
    async with failing_server(2) as server, AsyncClient(server.address) as client:
        with pytest.raises(TransportError, match="not now"):
            await client.allocate("a")
        assert len(server.seen) == 1


async def test_message_limit_holds_both_ways_and_is_named():
    async with serving() as served, AsyncClient(served.address, max_message_bytes=1000) as client:
        with pytest.raises(
            TransportError, match=r"Sent message larger.*: 1003 bytes, max_message_bytes is 1000"
        ) as caught:
            await client.allocate("a" * 1000)
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        for at in range(100):
            await client.allocate(f"sequence {at}")
        with pytest.raises(TransportError, match=r"Received message larger.* max_message_bytes is 1000"):
            await client.sequences()


TESTED_BY_EFFECT = {
    "grpc.max_receive_message_length": "test_message_limit_holds_both_ways_and_is_named",
    "grpc.max_send_message_length": "test_message_limit_holds_both_ways_and_is_named",
    "grpc.service_config": "test_calls_that_may_be_repeated_are_and_others_never",
    "grpc.enable_http_proxy": "tests/client/test_errors.py",
    "grpc.initial_reconnect_backoff_ms": "test_first_tries_after_a_connection_breaks_come_sooner_than_by_default",
    "grpc.max_reconnect_backoff_ms": "test_rl14_client_is_back_while_one_with_grpc_defaults_still_waits",
    "grpc.min_reconnect_backoff_ms": "test_server_that_takes_a_connection_and_says_nothing_is_tried_again_sooner_...",
    "grpc.dns_min_time_between_resolutions_ms": "test_name_is_looked_up_again_during_an_outage_...",
    "grpc.use_local_subchannel_pool": "test_rl14_new_client_in_the_process_does_not_inherit_the_wait_of_an_old_one",
    "grpc.keepalive_time_ms": "test_connection_that_goes_silent_ends_a_call_that_would_wait_for_ever",
    "grpc.http2.ping_timeout_ms": "test_connection_that_goes_silent_ends_a_call_that_would_wait_for_ever",
}


def test_each_option_is_one_that_the_core_reads_and_has_a_test_of_its_effect():
    names = [name for name, _ in channel_options("127.0.0.1:1", 2**20)]
    with open(cygrpc.__file__, "rb") as file:
        core = file.read()
    assert [name for name in names if name.encode() + b"\0" not in core] == []
    assert sorted(names) == sorted(TESTED_BY_EFFECT)
