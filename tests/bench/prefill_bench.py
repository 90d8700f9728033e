"""Causal prefill on paged KV, alone and on a context, and with --peers PyTorch and vLLM: `./run bench prefill`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from pagedkv.compute.cpu.compile_cache import compile_kernel
from pagedkv.compute.cpu.simd import add, fma, load_i64, splat, store
from pagedkv.dtypes import DType
from tests.bench.attention_bench import peer_cells, peer_columns
from tests.bench.attention_common import FilledPool, Shape
from tests.bench.peers import PAUSE_SECONDS, AttentionPeer, start_attention_peers
from tests.bench.report import median_p10, print_peers, print_table, take_turns, write_result

SHAPES = tuple(
    Shape(1, length + context, 32, 8, 128, query_len=length) for length in (512, 2048) for context in (0, 4096)
)
DTYPES = (DType.FLOAT32, DType.BFLOAT16)
ROTATION_BYTES = 1 << 26
CALLS = 3
COLUMNS = ("queries on context, dtype", "ours ms", "GFLOP/s", "of FMA peak")
_FMAS = 1 << 20


def _fma_chains(args: int, thread: int) -> None:
    """Run 8 independent chains of fused multiply-adds: the machine's float32 limit."""
    x = splat(np.float32(1.0), 16)
    a = b = c = d = e = f = g = h = splat(np.float32(0.0), 16)
    for _ in range(_FMAS):
        a, b, c, d = fma(x, x, a), fma(x, x, b), fma(x, x, c), fma(x, x, d)
        e, f, g, h = fma(x, x, e), fma(x, x, f), fma(x, x, g), fma(x, x, h)
    store(load_i64(args + 16) + 64 * thread, add(add(add(a, b), add(c, d)), add(add(e, f), add(g, h))))


def fma_seconds_per_flop(num_threads: int, seconds: float) -> float:
    return seconds / (num_threads * _FMAS * 8 * 16 * 2)


def measure(shape: Shape, dtype: DType, peers: Sequence[AttentionPeer], rounds: int) -> dict[str, Any]:
    """Time one problem in turns with the peers and the peak, after comparing it with the oracle."""
    pool = FilledPool(shape, dtype, 16, rotation_bytes=ROTATION_BYTES)
    error = pool.error()
    assert error <= 2e-6, f"{shape} {dtype}: error {error:.1e}"
    for peer in peers:
        request = {**asdict(shape), "dtype": str(dtype), "rotation_bytes": ROTATION_BYTES}
        peer.prepare(request, pool.backend.num_threads)
    kernel, out = compile_kernel(_fma_chains, "fma-chains", (), (__file__,)), np.zeros(32, np.float32)
    args = np.array([0, 1, out.ctypes.data], np.int64)

    def peak_seconds() -> float:
        start = time.perf_counter()
        kernel.call(args.ctypes.data, 0)
        per_flop = fma_seconds_per_flop(1, time.perf_counter() - start) / pool.backend.num_threads
        return per_flop * shape.flops()

    turns = {"ours": pool.seconds, "peak": peak_seconds, **{peer.label: peer.seconds for peer in peers}}
    pause, rotation = (PAUSE_SECONDS, shape.rotation(dtype, ROTATION_BYTES)) if peers else (0, 0)
    samples = take_turns(turns, rounds, pause, calls=CALLS, calls_untimed=rotation)
    pool.close()
    timings = {name: median_p10(values)._asdict() for name, values in samples.items()}
    return {
        "shape": asdict(shape),
        "dtype": str(dtype),
        "error": error,
        "milliseconds": timings,
        "gflops": shape.flops() / timings["ours"]["median"] / 1e6,
    }


def row(result: dict[str, Any], labels: Sequence[str]) -> list[object]:
    timings, shape = result["milliseconds"], result["shape"]
    ours = timings["ours"]["median"]
    label = f"{shape['query_len']} on {shape['context'] - shape['query_len']}, {result['dtype']}"
    return [label, ours, result["gflops"], timings["peak"]["median"] / ours, *peer_cells(timings, labels)]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./run bench prefill", description=__doc__)
    parser.add_argument("--peers", action="store_true", help="time PyTorch and vLLM too, in environments made for them")
    parser.add_argument("--rounds", type=int, default=5, help=f"turns of each, with {CALLS} timed calls")
    options = parser.parse_args(argv)
    peers, missing = start_attention_peers(options.peers)
    labels, names = [peer.label for peer in peers], {peer.label: peer.name for peer in peers}
    problems = track([(shape, dtype) for dtype in DTYPES for shape in SHAPES], "problems", console=Console(stderr=True))
    results = [measure(shape, dtype, peers, options.rounds) for shape, dtype in problems]
    title = "Causal prefill, 32 heads, 8 KV heads, head dim 128, block size 16, times in ms"
    print_table(title, [*COLUMNS, *peer_columns(labels)], [row(item, labels) for item in results])
    print_peers(names, missing)
    print(write_result("prefill", {"peers": names, "missing": missing, "block_size": 16, "results": results}))
    for peer in peers:
        peer.close()
    return 0
