"""Linear layers over stored weights, beside the machine's multiply-add peak and read bandwidth of the same run."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pagedkv.compute.backend import WeightData
from pagedkv.compute.cpu.compile_cache import compile_kernel
from pagedkv.compute.cpu.dense import CpuDenseOps
from pagedkv.compute.cpu.dense_tiles import make_tile
from pagedkv.compute.cpu.features import choose_isa
from pagedkv.compute.cpu.quant import KINDS
from pagedkv.compute.cpu.simd import load_i64
from pagedkv.compute.cpu.threads import WorkerPool, claim
from pagedkv.config import ACTIVATIONS
from tests.bench.report import median_p10, print_table, write_result

_RESIDENT_INPUTS = 256  # a tile of this length stays in the first-level cache
_PEAK_TILES = 20_000


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="./run bench dense", description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 32, 512])
    parser.add_argument("--outputs", type=int, default=1536)
    parser.add_argument("--inputs", type=int, default=1536)
    parser.add_argument("--megabytes", type=int, default=128, help="stored weights to rotate over (default 128)")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--activations", choices=ACTIVATIONS, default=ACTIVATIONS[0])
    options = parser.parse_args(argv)
    workers = WorkerPool(options.threads)
    ops = CpuDenseOps(choose_isa(), workers, activations=options.activations)
    limits = {"peak_gflops": measure_peak(workers), "read_gb_per_s": measure_read(workers.num_threads)}
    cases = [measure_case(ops, kind, rows, options) for kind in options.kinds for rows in options.rows]
    columns = ("kind", "rows", "GFLOP/s", "of peak", "GB/s", "of read")
    rows = [
        (
            case["kind"],
            case["rows"],
            case["gflops"],
            case["gflops"] / limits["peak_gflops"],
            case["gb_per_s"],
            case["gb_per_s"] / limits["read_gb_per_s"],
        )
        for case in cases
    ]
    print_table(
        f"{workers.num_threads} threads; " + ", ".join(f"{k} {v:.1f}" for k, v in limits.items()), columns, rows
    )
    write_result(
        "dense", {"threads": workers.num_threads, "activations": options.activations, **limits, "cases": cases}
    )
    workers.close()
    return 0


def measure_case(ops: CpuDenseOps, kind: str, num_rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return median and best rates of one kind and row count over weights that no cache holds."""
    num_bytes = options.outputs * KINDS[kind].row_bytes(options.inputs)
    count = max(2, options.megabytes * 2**20 // num_bytes)
    shape = (options.outputs, options.inputs)
    rng = np.random.default_rng(0)
    weights = [
        ops.load_weight(WeightData(kind, shape, rng.integers(0, 60, num_bytes, dtype=np.uint8))) for _ in range(count)
    ]
    x = rng.standard_normal((num_rows, options.inputs), np.float32)
    num_calls = max(2, min(count, int(4e10 / (2 * num_rows * options.outputs * options.inputs))))
    samples = [time_call(lambda weight=weight: ops.linear(x, weight)) for weight in weights[:num_calls]]
    timing = median_p10(samples[1:])
    return {
        "kind": kind,
        "rows": num_rows,
        "seconds": timing.median,
        "seconds_p10": timing.p10,
        "gflops": 2e-9 * num_rows * options.outputs * options.inputs / timing.median,
        "gb_per_s": 1e-9 * num_bytes / timing.median,
    }


def measure_peak(workers: WorkerPool) -> float:
    """Return GFLOP/s of tiles whose operands stay in the first-level cache, best of five."""
    isa = choose_isa()
    num_rows = 6 if isa.width == 16 else 3
    tile = make_tile(KINDS["F32"].parts, num_rows, 4, isa.width)
    num_blocks, row_bytes, num_tiles = _RESIDENT_INPUTS // 16, 4 * _RESIDENT_INPUTS, _PEAK_TILES

    def peak(args: int, thread: int) -> None:
        item = claim(args)
        while item >= 0:
            place = load_i64(args + 16) + 65536 * thread
            for _ in range(num_tiles):
                tile(place, row_bytes, num_rows - 1, place + 16384, row_bytes, 3, num_blocks, place + 32768, 16)
            item = claim(args)

    kernel = compile_kernel(peak, "bench-peak", (isa.name, num_rows, num_tiles), (make_tile.__code__.co_filename,))
    data = np.zeros(16384 * workers.num_threads + 16, np.float32)
    start = -(-data.ctypes.data // 64) * 64
    best = min(
        time_call(lambda: workers.run(kernel, np.array([0, 2 * workers.num_threads, start], np.int64)))
        for _ in range(5)
    )
    return 2e-9 * 2 * workers.num_threads * num_tiles * num_rows * 4 * _RESIDENT_INPUTS / best


def measure_read(num_threads: int) -> float:
    """Return GB/s of reading 256 MB once with all threads through a memory-bound product, best of five."""
    data = np.ones(1 << 25, np.uint64)
    return 1e-9 * data.nbytes / min(time_call(lambda: _sum_in_threads(data, num_threads)) for _ in range(5))


def _sum_in_threads(data: np.ndarray, num_threads: int) -> None:
    parts = np.array_split(data, num_threads)
    threads = [threading.Thread(target=np.bitwise_or.reduce, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def time_call(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
