"""Decode attention over cold paged KV beside the read bandwidth and, with --peers, PyTorch: `./run bench attention`."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import Any

from pagedkv.dtypes import DType
from tests.bench.attention_common import ROTATION_BYTES, FilledPool, ReadLimit, Shape
from tests.bench.peers import TorchPeer
from tests.bench.report import median_p10, print_table, write_result

SHAPES = (
    Shape(1, 4096, 32, 8, 128),
    Shape(16, 2048, 32, 8, 128),
    Shape(64, 512, 32, 8, 128),
    Shape(16, 2048, 9, 3, 64),
)
DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.INT8, DType.FLOAT8_E4M3)
TOLERANCE = {DType.INT8: 0.02, DType.FLOAT8_E4M3: 0.1}
COLUMNS = ("shape, dtype", "limit ms", "ours ms", "share of limit", "share at p10", "peer ms", "peer / ours")


def measure(shape: Shape, dtype: DType, limit: ReadLimit, peer: TorchPeer | None, rounds: int) -> dict[str, Any]:
    """Time one problem; ours, the limit and the peer take turns, after the result was compared with the oracle."""
    pool = FilledPool(shape, dtype, block_size=16)
    error = pool.error()
    assert error <= TOLERANCE.get(dtype, 2e-6), f"{shape} {dtype}: error {error:.1e}"
    has_peer = peer is not None and not dtype.is_quantized
    if peer is not None and has_peer:
        request = {**asdict(shape), "dtype": str(dtype), "rotation_bytes": ROTATION_BYTES}
        peer.prepare(request, pool.backend.num_threads)
    samples: dict[str, list[float]] = {"ours": [], "limit": [], "peer": []}
    for _ in range(rounds):
        samples["ours"].append(1e3 * pool.seconds())
        samples["limit"].append(1e3 * limit.seconds(shape.kv_bytes(dtype)))
        if peer is not None and has_peer:
            samples["peer"].append(1e3 * peer.seconds())
            time.sleep(0.02)  # its idle threads spin for a while, which the next turns must not pay for
    pool.close()
    timings = {name: median_p10(values)._asdict() for name, values in samples.items() if values}
    return {"shape": asdict(shape), "dtype": str(dtype), "error": error, "milliseconds": timings}


def row(result: dict[str, Any]) -> list[object]:
    timings, shape = result["milliseconds"], result["shape"]
    ours, limit = timings["ours"], timings["limit"]
    label = f"({', '.join(str(shape[name]) for name in list(shape)[:5])}) {result['dtype']}"
    peer = timings.get("peer", {}).get("median")
    shares = [limit["median"] / ours["median"], limit["p10"] / ours["p10"]]
    return [label, limit["median"], ours["median"], *shares, peer or "-", peer / ours["median"] if peer else "-"]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./run bench attention", description=__doc__)
    parser.add_argument("--peers", action="store_true", help="time PyTorch too, in an environment made for it")
    parser.add_argument("--rounds", type=int, default=25, help="timed calls of each")
    parser.add_argument("--dtypes", nargs="+", choices=[str(dtype) for dtype in DTYPES], default=None)
    options = parser.parse_args(argv)
    peer = TorchPeer() if options.peers else None
    limit = ReadLimit()
    dtypes = [DType(name) for name in options.dtypes] if options.dtypes else DTYPES
    results = [measure(shape, dtype, limit, peer, options.rounds) for dtype in dtypes for shape in SHAPES]
    name = peer.name if peer else "none asked for"
    print_table(f"Decode attention, block size 16, cold KV; peer: {name}", COLUMNS, [row(item) for item in results])
    print(write_result("attention", {"peer": name, "block_size": 16, "results": results}))
    if peer:
        peer.close()
    return 0
