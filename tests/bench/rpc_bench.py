"""Round trips of Attend over loopback, with the time inside the device job beside them: `./run bench rpc`.

The server is a process of its own, `pagedkv serve --no-model`; the client is this process. Each way of calling sends
the same decode step (one new query for each sequence) and takes turns with the others in short rounds, so that other
load on the machine meets all of them alike. Overhead is what a call costs beyond the job: gRPC, messages, planning.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np

from pagedkv.client import AsyncClient, Attention
from tests.bench.report import print_table, write_result
from tests.helpers.process import ServiceProcess

BLOCK_SIZE, LAYER = 16, 0
COLUMNS = ("call", "p50", "p99", "in the job, p50", "overhead, p50", "calls/s")
Call = Callable[[], Awaitable[Attention]]


@dataclass(frozen=True, slots=True)
class Load:
    """One decode step: a query, and for the writing calls a key and a value, for each of `batch` sequences."""

    name: str
    batch: int
    context: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_blocks(self) -> int:
        return self.batch * (-(-self.context // BLOCK_SIZE) + 8)


LOADS = (
    Load("SmolLM2-135M, 1 x 512", 1, 512, 9, 3, 64),
    Load("SmolLM2-135M, 8 x 512", 8, 512, 9, 3, 64),
    Load("Llama-3-8B, 1 x 2048", 1, 2048, 32, 8, 128),
    Load("Llama-3-8B, 8 x 2048", 8, 2048, 32, 8, 128),
)


@dataclass(slots=True)
class Samples:
    """Seconds of one way of calling, call by call."""

    round_trips: list[float] = field(default_factory=list)
    computes: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Figure:
    """Microseconds of one way of calling under one load; overhead is the median of round trip less job."""

    load: str
    call: str
    p50: float
    p99: float
    compute_p50: float
    overhead_p50: float
    calls_per_second: float


class DecodeStep:
    """The calls of one load; the writing ones lengthen the sequences until `rewind`."""

    def __init__(self, client: AsyncClient, load: Load) -> None:
        self._client, self._load = client, load
        rng = np.random.default_rng(0)
        self._names = [f"sequence-{at}" for at in range(load.batch)]
        self._queries = rng.standard_normal((load.batch, load.num_heads, load.head_dim), np.float32)
        row = (load.batch, load.num_kv_heads, load.head_dim)
        self._rows = {"keys": rng.standard_normal(row, np.float32), "values": rng.standard_normal(row, np.float32)}

    async def fill(self) -> None:
        """Write the context of every sequence."""
        rng = np.random.default_rng(1)
        shape = (self._load.context, self._load.num_kv_heads, self._load.head_dim)
        for name in self._names:
            await self._client.allocate(name)
            rows = (rng.standard_normal(shape, np.float32) for _ in range(2))
            await self._client.append(name, *rows, layer=LAYER)

    async def rewind(self) -> None:
        """Give back what the writing calls have added."""
        for name in self._names:
            await self._client.truncate(name, self._load.context)

    def calls(self, step: Any) -> dict[str, Call]:
        """Return the ways of calling, unary and over an open stream."""
        batch = (self._names, self._queries)
        return {
            "Attend": lambda: self._client.attend(*batch, layer=LAYER),
            "Attend with K and V": lambda: self._client.attend(*batch, layer=LAYER, **self._rows),
            "Step": lambda: step.attend(*batch, layer=LAYER),
            "Step with K and V": lambda: step.attend(*batch, layer=LAYER, **self._rows),
        }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench rpc", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each way of calling")
    parser.add_argument("--calls", type=int, default=20, help="calls a round, at most 100")
    options = parser.parse_args(argv)
    figures = []
    for load in LOADS:
        taken = bench_load(load, options.rounds, min(options.calls, 100))
        print_table(f"{load.name}, microseconds over loopback", COLUMNS, [row(figure) for figure in taken])
        figures += taken
    result = {"unit": "microseconds", "block_size": BLOCK_SIZE, "figures": [asdict(figure) for figure in figures]}
    print(f"written to {write_result('rpc', result)}")
    return 0


def bench_load(load: Load, num_rounds: int, num_calls: int) -> list[Figure]:
    """Serve a pool of the load's shape and time every way of calling."""
    with ServiceProcess(*serve_arguments(load)) as service:
        samples = asyncio.run(measure(service.address, load, num_rounds, num_calls))
    return [to_figure(load, call, taken) for call, taken in samples.items()]


def serve_arguments(load: Load) -> list[str]:
    """Return the command line of a bare cache with one layer of the load's shape."""
    shape = {"heads": load.num_heads, "kv-heads": load.num_kv_heads, "head-dim": load.head_dim, "layers": 1}
    options = {**shape, "blocks": load.num_blocks, "block-size": BLOCK_SIZE}
    return ["serve", "--no-model", *(f"--{name}={value}" for name, value in options.items())]


async def measure(address: str, load: Load, num_rounds: int, num_calls: int) -> dict[str, Samples]:
    """Return the samples of each way of calling; the first round of each warms up."""
    async with AsyncClient(address, timeout=60) as client:
        work = DecodeStep(client, load)
        await work.fill()
        async with client.step() as step:
            calls = work.calls(step)
            samples = {name: Samples() for name in calls}
            for at in range(num_rounds + 1):
                for name, call in calls.items():
                    await run_round(call, num_calls, samples[name] if at else Samples())
                    await work.rewind()
    return samples


async def run_round(call: Call, num_calls: int, samples: Samples) -> None:
    """Call one after another and keep the times."""
    for _ in range(num_calls):
        started = time.perf_counter()
        result = await call()
        samples.round_trips.append(time.perf_counter() - started)
        samples.computes.append(result.compute_seconds)


def to_figure(load: Load, call: str, samples: Samples) -> Figure:
    """Return the figures of one way of calling."""
    trips, computes = samples.round_trips, samples.computes
    overheads = [trip - compute for trip, compute in zip(trips, computes, strict=True)]
    microseconds = (median(trips), percentile(trips, 0.99), median(computes), median(overheads))
    return Figure(
        load.name, call, *(round(value * 1e6, 1) for value in microseconds), round(len(trips) / sum(trips), 1)
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def row(figure: Figure) -> tuple[object, ...]:
    """Return the figure as a line of the table."""
    figures = (figure.p50, figure.p99, figure.compute_p50, figure.overhead_p50, figure.calls_per_second)
    return (figure.call, *(f"{value:.0f}" for value in figures))
