"""Decode attention over cold paged KV beside the read bandwidth and, with --peers, PyTorch and vLLM's CPU backend:
`./run bench attention`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import track

from pagedkv.dtypes import DType
from tests.bench.attention_common import ROTATION_BYTES, FilledPool, ReadLimit, Shape
from tests.bench.peers import PAUSE_SECONDS, AttentionPeer, start_attention_peers
from tests.bench.report import median_p10, print_peers, print_table, take_turns, write_result

SHAPES = (
    Shape(1, 4096, 32, 8, 128),
    Shape(16, 2048, 32, 8, 128),
    Shape(64, 512, 32, 8, 128),
    Shape(16, 2048, 9, 3, 64),
)
DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.INT8, DType.FLOAT8_E4M3)
TOLERANCE = {DType.INT8: 0.02, DType.FLOAT8_E4M3: 0.1}
CALLS = 5  # one behind the other, as the layers of a step are
COLUMNS = ("shape, dtype", "limit ms", "ours ms", "share", "at p10", "float16 / ours")


def measure(
    shape: Shape, dtype: DType, limit: ReadLimit, all_peers: Sequence[AttentionPeer], rounds: int
) -> dict[str, Any]:
    """Time one problem; ours, the limit and the peers take turns, after the result was compared with the oracle.

    With 8-bit elements float16 takes turns too: the cache then holds as many tokens in half the memory.
    """
    pool = FilledPool(shape, dtype, block_size=16)
    error = pool.error()
    assert error <= TOLERANCE.get(dtype, 2e-6), f"{shape} {dtype}: error {error:.1e}"
    peers = () if dtype.is_quantized else all_peers
    for peer in peers:
        request = {**asdict(shape), "dtype": str(dtype), "rotation_bytes": ROTATION_BYTES}
        peer.prepare(request, pool.backend.num_threads)
    wider = FilledPool(shape, DType.FLOAT16, block_size=16) if dtype.is_quantized else None
    turns = {"ours": pool.seconds, "limit": lambda: limit.seconds(shape.kv_bytes(dtype))}
    if wider:
        turns["float16"] = wider.seconds
    turns |= {peer.label: peer.seconds for peer in peers}
    pause, rotation = (PAUSE_SECONDS, shape.rotation(dtype)) if peers else (0, 0)
    samples = take_turns(turns, rounds, pause, calls=CALLS, calls_untimed=rotation)
    pool.close()
    if wider:
        wider.close()
    timings = {name: median_p10(values)._asdict() for name, values in samples.items()}
    return {"shape": asdict(shape), "dtype": str(dtype), "error": error, "milliseconds": timings}


def row(result: dict[str, Any], labels: Sequence[str]) -> list[object]:
    timings, shape = result["milliseconds"], result["shape"]
    ours, limit = timings["ours"], timings["limit"]
    label = f"({', '.join(str(shape[name]) for name in list(shape)[:5])}) {result['dtype']}"
    shares = [limit["median"] / ours["median"], limit["p10"] / ours["p10"]]
    wider = timings["float16"]["median"] / ours["median"] if "float16" in timings else "-"
    return [label, limit["median"], ours["median"], *shares, wider, *peer_cells(timings, labels)]


def peer_cells(timings: Mapping[str, Mapping[str, float]], labels: Sequence[str]) -> list[object]:
    """Return each peer's median and how many times as long the fastest of them takes as we do."""
    times = [timings[label]["median"] if label in timings else None for label in labels]
    known = [time for time in times if time is not None]
    ratios = [min(known) / timings["ours"]["median"] if known else "-"] if labels else []
    return [*("-" if time is None else time for time in times), *ratios]


def peer_columns(labels: Sequence[str]) -> list[str]:
    """Return the headings of `peer_cells`."""
    return [*labels, "best / ours"] if labels else []


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./run bench attention", description=__doc__)
    parser.add_argument("--peers", action="store_true", help="time PyTorch and vLLM too, in environments made for them")
    parser.add_argument("--rounds", type=int, default=8, help=f"turns of each, with {CALLS} timed calls")
    parser.add_argument("--dtypes", nargs="+", choices=[str(dtype) for dtype in DTYPES], default=None)
    options = parser.parse_args(argv)
    peers, missing = start_attention_peers(options.peers)
    limit, labels = ReadLimit(), [peer.label for peer in peers]
    dtypes = [DType(name) for name in options.dtypes] if options.dtypes else DTYPES
    problems = track([(shape, dtype) for dtype in dtypes for shape in SHAPES], "problems", console=Console(stderr=True))
    results = [measure(shape, dtype, limit, peers, options.rounds) for shape, dtype in problems]
    names = {peer.label: peer.name for peer in peers}
    rows = [row(item, labels) for item in results]
    print_table("Decode attention, block size 16, cold KV, times in ms", [*COLUMNS, *peer_columns(labels)], rows)
    print_peers(names, missing)
    print(write_result("attention", {"peers": names, "missing": missing, "block_size": 16, "results": results}))
    for peer in peers:
        peer.close()
    return 0
