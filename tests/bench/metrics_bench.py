"""What being watched costs: a scrape by pool size, a frame of the page map, and how late the loop runs meanwhile."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from pagedkv.cache import CacheManager
from pagedkv.compute.layout import KvLayout
from pagedkv.config import CacheConfig, KvShape
from pagedkv.metrics.http import MetricsServer
from pagedkv.metrics.service import ServiceMetrics
from tests.bench.report import Timing, median_p10, print_table, write_result

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
SHAPE = KvShape(num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64)
METHODS = ("Allocate", "Append", "Attend", "Free", "Fork", "GetSequence")


def make_service(num_blocks: int) -> tuple[CacheManager, ServiceMetrics]:
    """Return a cache about two thirds full of sequences of mixed lengths, with holes, and its metrics."""
    cache = CacheManager(CacheConfig(num_blocks))
    metrics = ServiceMetrics(cache, KvLayout(SHAPE, num_blocks, 16), backend_name="cpu")
    rng, names = random.Random(0), []
    while cache.num_available() > num_blocks // 10:
        names.append(f"s{len(names)}")
        cache.allocate(names[-1])
        cache.commit(cache.reserve(names[-1], rng.randint(16, min(4096, num_blocks))))
    for name in rng.sample(names, len(names) // 3):
        cache.free(name)
    for method in METHODS:
        for code in ("OK", "NOT_FOUND"):
            metrics.rpc_observer.on_rpc(f"KvCache/{method}", code, 0.01)
    return cache, metrics


def time_calls(call: Callable[[], object], count: int) -> Timing:
    """Return the time of a call in milliseconds."""
    samples = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        samples.append((time.perf_counter() - started) * 1e3)
    return median_p10(samples)


def measure_costs(num_blocks: int, count: int) -> dict[str, Timing]:
    """Return what each reading of a pool of this size costs."""
    cache, metrics = make_service(num_blocks)
    name = cache.sequence_ids()[0]
    frames = metrics.frames
    frames.advance()

    def advance() -> None:
        cache.commit(cache.reserve(name, 1))
        frames.advance()

    return {
        "scrape, text": time_calls(lambda: metrics.scrape("text/plain"), count),
        "scrape, OpenMetrics": time_calls(lambda: metrics.scrape(OPENMETRICS), count),
        "page map frame": time_calls(advance, count),
        "page map snapshot": time_calls(lambda: json.dumps(frames.snapshot()), count),
    }


async def measure_delay(cache: CacheManager, seconds: float) -> dict[str, float]:
    """Return how late a loop that allocates, writes and frees all the time wakes from a sleep of a millisecond."""
    late, until, index = [], time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        index += 1
        cache.allocate(f"load-{index}")
        cache.commit(cache.reserve(f"load-{index}", 200))
        started = time.perf_counter()
        await asyncio.sleep(0.001)
        late.append((time.perf_counter() - started - 0.001) * 1e3)
        cache.free(f"load-{index}")
    late.sort()
    return {"median": late[len(late) // 2], "p99": late[len(late) * 99 // 100], "worst": late[-1]}


async def scrape_for_ever(port: int, per_second: float) -> None:
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /metrics HTTP/1.1\r\nAccept: {OPENMETRICS}\r\n\r\n".encode())
        await reader.read()
        writer.close()
        await asyncio.sleep(1 / per_second)


async def watch_for_ever(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /api/events HTTP/1.1\r\n\r\n")
    while await reader.read(2**20):
        pass


async def hang_for_ever(port: int) -> None:
    """Ask twenty times for everything and read nothing."""
    held = []
    for path in ("metrics", "api/events") * 10:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", port))
        connection.sendall(f"GET /{path} HTTP/1.1\r\n\r\n".encode())
        held.append(connection)
    try:
        await asyncio.sleep(3600)
    finally:
        for connection in held:
            connection.close()


@asynccontextmanager
async def running(*watchers: asyncio.Task[None]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher


async def measure_delays(num_blocks: int, seconds: float) -> dict[str, dict[str, float]]:
    """Return the loop's delay by who is watching."""
    cache, metrics = make_service(num_blocks)
    server = MetricsServer(metrics, port=0)
    await server.start()
    watchers: dict[str, Callable[[], list[asyncio.Task[None]]]] = {
        "nobody": list,
        "10 scrapes a second": lambda: [asyncio.create_task(scrape_for_ever(server.port, 10))],
        "a page map": lambda: [asyncio.create_task(watch_for_ever(server.port))],
        "20 readers that hang": lambda: [asyncio.create_task(hang_for_ever(server.port))],
    }
    delays = {}
    for name, start in watchers.items():
        async with running(*start()):
            await asyncio.sleep(0.3)
            delays[name] = await measure_delay(cache, seconds)
    await server.stop()
    return delays


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000, 100_000])
    parser.add_argument("--count", type=int, default=200, help="samples of each cost")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement of delay")
    options = parser.parse_args(argv)
    costs = {blocks: measure_costs(blocks, options.count) for blocks in options.blocks}
    delays = asyncio.run(measure_delays(max(options.blocks), options.seconds))
    print_table(
        "cost on the loop, ms",
        ("", *(f"{blocks} blocks{part}" for blocks in costs for part in ("", ", p10"))),
        [(name, *(part for cost in costs.values() for part in cost[name])) for name in next(iter(costs.values()))],
    )
    columns = ("median", "p99", "worst")
    print_table(
        f"the loop's delay under load at {max(options.blocks)} blocks, ms",
        ("watched by", *columns),
        [(name, *(delay[column] for column in columns)) for name, delay in delays.items()],
    )
    result = {blocks: {name: timing._asdict() for name, timing in cost.items()} for blocks, cost in costs.items()}
    write_result("metrics", {"cost_ms": result, "loop_delay_ms": delays})
    return 0
