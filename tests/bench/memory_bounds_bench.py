"""Resident memory of a server before, during and after what used to grow without a bound: `./run bench memory-bounds`.

The server is a process of its own, a bare cache; it is given each load by clients that do not wait for each other.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import numpy as np
import psutil

from pagedkv.client.asynchronous import make_attend_request
from pagedkv.v1 import kv_cache_pb2
from tests.bench.report import print_table, write_result
from tests.helpers.process import ServiceProcess

NUM_HEADS, HEAD_DIM = 8, 64
COLUMNS = ("load", "before, MiB", "peak", "after", "bound of the growth", "answers")
SETTLE_SECONDS, SAMPLE_SECONDS, CALL_SECONDS = 2.0, 0.005, 300.0
OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
MESSAGE_BYTES, INFLIGHT_BYTES, SEQUENCE_BYTES, MAX_SEQUENCES = 32 * 2**20, 256 * 2**20, 2_048, 16_384
KEPT_BYTES = 256 * 2**20  # by the C library before it is told to give memory back
# eight messages of a connection being received, one of them copied, and those that count as in flight
RECEIVED_BYTES = 8 * MESSAGE_BYTES + 3 * MESSAGE_BYTES + INFLIGHT_BYTES + KEPT_BYTES
ANSWER_BYTES = 3 * INFLIGHT_BYTES  # of Attend: as computed, as a message, as handed to the network
Load = Callable[[Any], Awaitable[Counter[str]]]


@dataclass(frozen=True, slots=True)
class Figure:
    """MiB of the server's resident memory, the stated bound of their growth, and the calls' statuses."""

    load: str
    before: float
    peak: float
    after: float
    bound: float
    answers: str

    @property
    def is_within(self) -> bool:
        return self.peak - self.before <= self.bound and self.after - self.before <= KEPT_BYTES / 2**20


class PeakWatch:
    """Samples a process's resident memory until the block ends."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._ended = threading.Event()
        self.peak = 0

    def __enter__(self) -> PeakWatch:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def resident(self) -> int:
        return int(self._process.memory_info().rss)

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, self.resident)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench memory-bounds", description=__doc__)
    parser.add_argument("--sequences", type=int, default=50_000, help="empty sequences to ask for")
    options = parser.parse_args(argv)
    shape = {"heads": NUM_HEADS, "kv-heads": 2, "head-dim": HEAD_DIM, "layers": 1, "blocks": 1024}
    arguments = ["serve", "--no-model", "--backend", "cpu", *(f"--{name}={value}" for name, value in shape.items())]
    with ServiceProcess(*arguments) as service:
        figures = asyncio.run(measure_all(service.address, service.process.pid, options.sequences))
    print_table("Resident memory of the server", COLUMNS, [row(figure) for figure in figures])
    path = write_result("memory_bounds", {"unit": "MiB", "figures": [asdict(figure) for figure in figures]})
    print(f"written to {path}")
    return 0 if all(figure.is_within for figure in figures) else 1


async def measure_all(address: str, pid: int, num_sequences: int) -> list[Figure]:
    """Give the server every load in turn."""
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        await warm_up(channel)
        loads: dict[str, tuple[Load, int]] = {
            "60 Allocate calls, request id of 30 MB": (large_request_ids, RECEIVED_BYTES),
            "60 Allocate calls, salt of 30 MB": (large_salts, RECEIVED_BYTES),
            "150 Attend calls of 6 MB": (attends, RECEIVED_BYTES + ANSWER_BYTES),
            f"{num_sequences:,} empty sequences": (
                lambda channel: empty_sequences(channel, num_sequences),
                SEQUENCE_BYTES * MAX_SEQUENCES,
            ),
            "20,000 answers to be remembered": (remembered_answers, 64 * 2**20),
        }
        return [await measure(name, load, bound, channel, pid) for name, (load, bound) in loads.items()]


async def measure(name: str, load: Load, bound: int, channel: Any, pid: int) -> Figure:
    """Return what one load does to the server's memory."""
    with PeakWatch(pid) as watch:
        before = watch.resident
        answers = await load(channel)
        peak = max(watch.peak, watch.resident)
        await asyncio.sleep(SETTLE_SECONDS)
        after = watch.resident
    counts = ", ".join(f"{count} {code}" for code, count in answers.items())
    return Figure(name, *(round(value / 2**20, 1) for value in (before, peak, after, bound)), counts)


async def warm_up(channel: Any) -> None:
    """Let the server compile what it needs, with a sequence "a" to attend to."""
    await call(channel, "Allocate", kv_cache_pb2.AllocateRequest(sequence_id="a"))
    rows = np.zeros((1, 2, HEAD_DIM), np.float32)
    queries = np.zeros((1, NUM_HEADS, HEAD_DIM), np.float32)
    await call(channel, "Attend", make_attend_request(["a"], queries, layer=0, keys=rows, values=rows))


async def large_request_ids(channel: Any) -> Counter[str]:
    requests = (
        kv_cache_pb2.AllocateRequest(sequence_id=f"r{at}", request_id=f"{at:02}" + "x" * 30_000_000) for at in range(60)
    )
    return await call_all(channel, "Allocate", requests)


async def large_salts(channel: Any) -> Counter[str]:
    requests = (
        kv_cache_pb2.AllocateRequest(sequence_id=f"s{at}", salt=at.to_bytes(1, "big") * 30_000_000) for at in range(60)
    )
    return await call_all(channel, "Allocate", requests)


async def attends(channel: Any) -> Counter[str]:
    count = 6 * 2**20 // (4 * NUM_HEADS * HEAD_DIM)
    await call(channel, "Allocate", kv_cache_pb2.AllocateRequest(sequence_id="long"))
    rows = np.zeros((count, 2, HEAD_DIM), np.float32)
    queries = np.ones((count, NUM_HEADS, HEAD_DIM), np.float32)
    options = {"layer": 0, "query_lens": [count]}
    await call(channel, "Attend", make_attend_request(["long"], queries, keys=rows, values=rows, **options))
    return await call_all(channel, "Attend", [make_attend_request(["long"], queries, **options)] * 150)


async def empty_sequences(channel: Any, count: int) -> Counter[str]:
    """Start that many, 64 at a time, and end those that were made."""
    answers: Counter[str] = Counter()
    for first in range(0, count, 64):
        names = [f"empty-{at}" for at in range(first, min(first + 64, count))]
        answers += await call_all(channel, "Allocate", [kv_cache_pb2.AllocateRequest(sequence_id=n) for n in names])
    made = answers["OK"]
    for first in range(0, made, 4_096):
        names = [f"empty-{at}" for at in range(first, min(first + 4_096, made))]
        await call(channel, "Free", kv_cache_pb2.FreeRequest(sequence_ids=names))
    return answers


async def remembered_answers(channel: Any) -> Counter[str]:
    answers: Counter[str] = Counter()
    for first in range(0, 20_000, 64):
        names = [f"remembered-{at}" for at in range(first, first + 64)]
        requests = [kv_cache_pb2.AllocateRequest(sequence_id=n, request_id=n + "x" * 200) for n in names]
        answers += await call_all(channel, "Allocate", requests)
    return answers


async def call_all(channel: Any, method: str, requests: Any) -> Counter[str]:
    """Send all at once and count their statuses."""
    return Counter(await asyncio.gather(*(call(channel, method, request) for request in requests)))


async def call(channel: Any, method: str, request: Any) -> str:
    """Send one and return its status."""
    try:
        await channel.unary_unary(f"/pagedkv.v1.KvCache/{method}")(request.SerializeToString(), timeout=CALL_SECONDS)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


def row(figure: Figure) -> tuple[object, ...]:
    """Return the figure as a line of the table."""
    values = (figure.before, figure.peak, figure.after, figure.bound)
    return (figure.load, *(f"{value:.0f}" for value in values), figure.answers)
