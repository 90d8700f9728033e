"""The metrics server: its answers, its manners towards bad and slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time

import pytest

from helpers.caches import run_prompt, write
from helpers.waiting import PATIENCE, until
from pagedkv.errors import InvalidArgument
from pagedkv.metrics.http import MetricsServer
from pagedkv.metrics.stream import Subscriber
from tests.metrics.support import OPENMETRICS, get, get_json, make_metrics, metrics_server, parse, scrape, value

WATCH = b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def raw(url, request, limit=65536):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(limit), PATIENCE)
    finally:
        writer.close()


async def read_frames(url):
    """Yield the frames of a stream, heartbeats left out."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]), limit=2**22)
    writer.write(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    try:
        while line := await asyncio.wait_for(reader.readline(), PATIENCE):
            if line.startswith(b"data: {") and len(line) > 20:
                yield json.loads(line[6:])
    finally:
        writer.close()


async def test_metrics_health_ready_and_page_answer():
    _, metrics = make_metrics()
    async with metrics_server(metrics) as (_, url):
        status, body, content_type = await get(url + "/metrics")
        assert status == 200
        assert content_type.startswith("text/plain")
        assert parse(body.decode()) == scrape(metrics)
        assert (await get(url + "/health"))[:2] == (200, b"ok\n")
        assert (await get(url + "/ready"))[:2] == (200, b"ready\n")
        metrics.is_ready = lambda: False
        assert (await get(url + "/ready"))[0] == 503
        status, page, content_type = await get(url + "/")
        assert status == 200
        assert content_type.startswith("text/html")
        assert b"src=" not in page
        assert b"//cdn" not in page


async def test_openmetrics_is_given_to_who_asks_for_it():
    _, metrics = make_metrics()
    async with metrics_server(metrics) as (_, url):
        _, body, content_type = await get(url + "/metrics", Accept=OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /nothing HTTP/1.1", 404),
        (b"POST /metrics HTTP/1.1", 405),
        (b"GET /api/sequences/gone HTTP/1.1", 404),
        (b"GET /api/blocks/24 HTTP/1.1", 404),
        (b"GET /api/blocks/-1 HTTP/1.1", 404),
        (b"GET /api/blocks/99999999999999 HTTP/1.1", 404),
        (b"GET /api/blocks/x HTTP/1.1", 404),
        (b"nonsense", 400),
        (b"GET  HTTP/1.1", 400),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1", 431),
        (b"GET /metrics HTTP/1.1\r\nHost: evil.example", 403),
        (b"GET /api/events HTTP/1.1\r\nHost: evil.example:80", 403),
    ],
)
async def test_bad_request_gets_its_status(request_line, status):
    _, metrics = make_metrics()
    async with metrics_server(metrics) as (_, url):
        answer = await raw(url, request_line + b"\r\n\r\n")
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


async def test_head_sends_no_body():
    _, metrics = make_metrics()
    async with metrics_server(metrics) as (_, url):
        answer = await raw(url, b"HEAD /metrics HTTP/1.1\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"Content-Length: " in head
    assert body == b""


async def test_mt07_port_in_use_is_refused_by_name_so_a_second_process_mixes_no_counters():
    _, metrics = make_metrics()
    async with metrics_server(metrics) as (server, _):
        with pytest.raises(InvalidArgument, match="cannot listen") as caught:
            await MetricsServer(metrics, port=server.port).start()
    assert caught.value.field == "metrics_port"


async def test_mt09_a_server_starts_and_stops_three_times_in_one_process():
    for _ in range(3):
        _, metrics = make_metrics()
        async with metrics_server(metrics) as (_, url):
            assert (await get(url + "/metrics"))[0] == 200


async def test_block_and_sequence_show_table_holders_and_ages():
    cache, metrics = make_metrics()
    run_prompt(cache, "a/b c", list(range(20)))
    cache.fork("a/b c", "fork")
    async with metrics_server(metrics) as (_, url):
        status, sequence = await get_json(url + "/api/sequences/a%2Fb%20c")
        assert status == 200
        assert [entry["physical"] for entry in sequence["block_table"]] == list(cache.block_table("fork"))
        assert {(entry["state"], entry["ref_count"]) for entry in sequence["block_table"]} == {("shared", 2)}
        _, block = await get_json(f"{url}/api/blocks/{cache.block_table('fork')[0]}")
        assert (block["state"], block["ref_count"], block["sequences"]) == ("shared", 2, ["a/b c", "fork"])
        assert block["age_seconds"] >= 0
        cache.free("a/b c")
        cache.free("fork")
        assert (await get_json(url + "/api/sequences/fork"))[0] == 404
        _, snapshot = await get_json(url + "/api/blocks")
        assert snapshot["blocks"]["cached"] == 2
        assert snapshot["sequences"] == []


async def test_stream_begins_with_a_snapshot_and_goes_on_with_deltas():
    cache, metrics = make_metrics()
    cache.allocate("a")
    async with metrics_server(metrics) as (_, url), contextlib.aclosing(read_frames(url)) as frames:
        assert (await anext(frames))["type"] == "snapshot"
        write(cache, "a", 8)
        async for frame in frames:
            assert frame["type"] == "delta"
            if frame["runs"]:
                break
    assert frame["runs"] == [[0, 1, 2]]


async def test_hanging_scrapers_hold_neither_the_loop_nor_each_other():
    cache, metrics = make_metrics(num_blocks=4096)
    async with metrics_server(metrics) as (_, url):
        port, hanging = int(url.rsplit(":", 1)[1]), []
        for request in (b"GET /met", b"GET /api/events HTTP/1.1\r\n\r\n", b"GET /metrics HTTP/1.1\r\n\r\n") * 5:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.sendall(request)
            hanging.append(connection)
        try:
            cache.allocate("a")
            worst, until = 0.0, time.monotonic() + 1.0
            while time.monotonic() < until:
                write(cache, "a", 8)
                started = time.monotonic()
                await asyncio.sleep(0.005)
                worst = max(worst, time.monotonic() - started - 0.005)
            assert worst < 5  # a blocked loop would stand for the readers' ten-second deadline
            assert (await get(url + "/metrics"))[0] == 200
        finally:
            for connection in hanging:
                connection.close()


@contextlib.asynccontextmanager
async def connected(port, count, request=b""):
    """Hold connections open that send the same beginning of a request and then nothing; yields their readers."""
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    for _, writer in held:
        writer.write(request)
    yield [reader for reader, _ in held]
    for _, writer in held:
        writer.transport.abort()


async def assert_probes_answer(url):
    for path in ("/metrics", "/health", "/ready"):
        assert (await get(url + path))[0] == 200


@pytest.mark.parametrize("count", [64, 65, 200])
@pytest.mark.parametrize("beginning", [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"])
async def test_rl09_probes_answer_while_half_open_connections_idle(beginning, count):
    _, metrics = make_metrics()
    async with metrics_server(metrics) as (server, url):
        async with connected(server.port, count, beginning):
            await until(lambda: server.num_connections == 64, "connections")
            await assert_probes_answer(url)
            await assert_probes_answer(url)
            assert server.num_connections <= 64 + 6
        await until(lambda: server.num_connections == 0, "end of the connections")


async def test_rl09_probes_answer_while_64_page_maps_are_open_and_one_more_is_told_so():
    _, metrics = make_metrics()
    async with metrics_server(metrics) as (server, url), connected(server.port, 64, WATCH) as readers:
        for reader in readers:
            assert b"200" in await asyncio.wait_for(reader.readline(), PATIENCE)
        await assert_probes_answer(url)
        assert (await raw(url, WATCH)).startswith(b"HTTP/1.1 503 ")
        async with connected(server.port, 64):
            await assert_probes_answer(url)


async def test_page_map_that_ends_makes_room_for_another():
    _, metrics = make_metrics()
    async with metrics_server(metrics) as (server, _):
        async with connected(server.port, 64, WATCH):
            await until(lambda: server.num_streams == 64, "page maps")
        await until(lambda: server.num_streams == 0, "end of the page maps")
        async with connected(server.port, 1, WATCH) as readers:
            assert b"200" in await asyncio.wait_for(readers[0].readline(), PATIENCE)


@pytest.mark.parametrize("path", ["/", "/metrics", "/health"])
async def test_rl09_probes_answer_while_others_do_not_read_their_answers(path):
    """Each kind has its places, and a kind's oldest gives way."""
    _, metrics = make_metrics(num_blocks=4096)
    async with metrics_server(metrics) as (server, url):
        async with connected(server.port, 100, f"GET {path} HTTP/1.1\r\n\r\n".encode()):
            await until(lambda: server.num_connections >= 64, "connections")
            await assert_probes_answer(url)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [(b"GET /" + b"x" * 2**21, 431), (b"POST /metrics HTTP/1.1\r\n\r\n" + b"x" * 2**21, 405)],
)
async def test_answer_to_a_request_that_is_not_read_to_its_end_arrives_all_the_same(request_line, status):
    """Closing a socket with bytes unread in it resets the connection, and the answer may be lost with it."""

    def exchange(port):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
            connection.sendall(request_line)
            return b"".join(iter(lambda: connection.recv(4096), b""))

    _, metrics = make_metrics()
    async with metrics_server(metrics) as (server, _):
        answer = await asyncio.to_thread(exchange, server.port)
        await until(lambda: server.num_connections == 0, "end of the connection")
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert answer.endswith(b"}\n")


async def test_connection_that_is_never_ended_by_its_reader_is_ended_all_the_same():
    _, metrics = make_metrics()
    async with metrics_server(metrics) as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /health HTTP/1.1\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), PATIENCE)).endswith(b"ok\n")
        await until(lambda: server.num_connections == 0, "end of the connection")
        writer.close()


async def test_subscriber_that_falls_behind_loses_frames_and_gets_a_snapshot():
    subscriber = Subscriber()
    subscriber.needs_snapshot = False
    for number in range(33):
        subscriber.offer(str(number))
    assert subscriber.needs_snapshot
    assert subscriber.num_dropped == 33
    subscriber.offer("snapshot")
    assert await anext(subscriber.frames()) == "snapshot"


async def test_stop_ends_open_streams_at_once():
    _, metrics = make_metrics()
    async with metrics_server(metrics) as (server, url), contextlib.aclosing(read_frames(url)) as frames:
        await anext(frames)
        await asyncio.wait_for(server.stop(), PATIENCE)
        assert server.num_connections == 0
        assert [frame async for frame in frames] == []


async def test_server_scrape_equals_the_cache_while_operations_go_on():
    cache, metrics = make_metrics(num_blocks=256)
    async with metrics_server(metrics) as (_, url):
        scraping = asyncio.create_task(get(url + "/metrics"))
        for index in range(50):
            run_prompt(cache, f"s{index}", list(range(index, index + 20)))
            await asyncio.sleep(0)
        _, body, _ = await scraping
        samples = parse(body.decode())
        states = {labels: count for (name, labels), count in samples.items() if name == "pagedkv_blocks"}
    assert sum(states.values()) == 256
    assert value(samples, "pagedkv_held_blocks") == states["private",] + states["shared",]
