"""Every operation once on small data: what a device computes beside what the virtual GPU computes from the same PTX."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.compute.backend import AttentionBatch, AttentionParams, Rotation, WeightData
from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.cuda.kernels import STORAGE_CODES
from pagedkv.compute.layout import KvLayout
from pagedkv.config import KvShape
from pagedkv.dtypes import DType

Results = dict[str, np.ndarray]
_SLOTS = np.array([5, 70, -1, 33, 34, 35, 36, 90, 6, 7, 8, 127, 0, 1], np.int64)
_ROPE_TOKENS = 600  # so many that a large device, too, gives a warp more than one of a token's 12 rows
_COPIES = [(0, 7), (7, 0), (2, 3), (4, 6)]  # one pair swapped, as if all sources were read first


def compare(options: dict[str, Any], wanted: Results) -> list[dict[str, Any]]:
    """Run all operations; a row each with the error against `wanted` and whether it is within its tolerance.

    Bytes that are only moved or converted must be equal; float32 arithmetic may differ by what exp2, sin and the
    order of sums cost; tensor cores and 16-bit products by 2e-3.
    """
    rows = []
    actual = results(options)
    for name, want in wanted.items():
        got = actual[name]
        error = _error(got, want)
        tolerance = 0.0 if want.dtype.kind in "ui" else 2e-3 if "tensor" in name or "16-bit" in name else 1e-5
        rows.append({"operation": name, "error": error, "ok": bool(got.shape == want.shape and error <= tolerance)})
    return rows


def _error(got: np.ndarray, want: np.ndarray) -> float:
    if got.shape != want.shape or np.isnan(got.astype(np.float64)).any():
        return float("inf")
    difference = np.abs(got.astype(np.float64) - want.astype(np.float64))
    return float(difference.max() / max(1.0, np.abs(want.astype(np.float64)).max()))


def results(options: dict[str, Any]) -> Results:
    """Return every operation's result by name."""
    found: Results = {}
    for dtype in STORAGE_CODES:
        found |= _run(dtype, {**options, "tensor_cores": False}, _pool_results, str(dtype))
    for dtype in (dtype for dtype in STORAGE_CODES if dtype is not DType.FLOAT32):
        found |= _run(dtype, {**options, "tensor_cores": True}, _pool_results, f"{dtype} tensor")
    for dtype in (DType.FLOAT16, DType.INT8):
        found |= _run(dtype, options, _rope_results, str(dtype))
    return found | _run(DType.FLOAT32, options, _dense_results, "float32")


def _run(dtype: DType, options: dict[str, Any], job: Any, label: str) -> Results:
    backend = CudaBackend(KvLayout(KvShape(2, 8, 2, 64, dtype), 8, 16), min_partition=16, num_host_blocks=3, **options)
    try:
        found: Results = backend.submit(lambda: job(backend)).result()
    finally:
        backend.close()
    return {f"{name} {label}": array for name, array in found.items()}


def _floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def _pool_results(backend: CudaBackend) -> Results:
    layout = backend.layout
    for block_id in range(layout.num_blocks):
        backend.write_block(block_id, np.zeros(layout.block_bytes, np.uint8))
    for layer in (0, 1):
        keys, values = (backend.from_host(_floats(128, 2, 64, seed=layer + side)) for side in (0, 5))
        backend.write_kv(layer, keys, values, np.random.default_rng(layer).permutation(128))
        keys, values = (backend.from_host(_floats(len(_SLOTS), 2, 64, seed=layer + side)) for side in (9, 11))
        backend.write_kv(layer, keys, values, _SLOTS)
    found = {f"write_kv block {block_id}": backend.read_block(block_id) for block_id in (0, 2, 5)}
    backend.copy_blocks(_COPIES)
    found |= {f"copy_blocks block {target}": backend.read_block(target) for _, target in _COPIES}
    backend.swap_out([(3, 2), (4, 0)])
    backend.copy_blocks([(0, 3), (0, 4)])
    backend.swap_in([(4, 2), (3, 0)])
    found |= {f"swapped block {block_id}": backend.read_block(block_id) for block_id in (3, 4)}
    tables = np.random.default_rng(3).permutation(8).astype(np.int32).reshape(2, 4)
    for name, context, queries in (("decode", (50, 17), (1, 1)), ("prefill", (64, 40), (30, 7))):
        starts = np.array([0, queries[0], sum(queries)], np.int32)
        batch = AttentionBatch(tables, np.array(context, np.int32), starts)
        query = backend.from_host(_floats(sum(queries), 8, 64, seed=4))
        for window in (None, 20):
            result = backend.attend(1, query, batch, AttentionParams(window=window, soft_cap=30.0))
            found[f"{name} window {window} output"] = backend.to_host(result.output)
            found[f"{name} window {window} lse"] = backend.to_host(result.lse)
    return found | _rope_results(backend, 3)


def _rope_results(backend: CudaBackend, num_tokens: int = _ROPE_TOKENS) -> Results:
    """Rotate and write tokens, of which every fifth has a slot."""
    layout = backend.layout
    rotation = Rotation((10_000.0 ** (-np.arange(32) / 32)).astype(np.float32), interleaved=False)
    q, k, v = (backend.from_host(_floats(num_tokens, heads, 64, seed=6)) for heads in (8, 2, 2))
    slots, written = np.full(num_tokens, -1), np.random.default_rng(6).permutation(128)
    slots[::5] = written[: len(slots[::5])]
    for block in range(layout.num_blocks):
        backend.write_block(block, np.zeros(layout.block_bytes, np.uint8))
    backend.rope_write_kv(0, q, k, v, np.arange(num_tokens, dtype=np.int32) * 7, slots, rotation)
    side = layout.value_stride * layout.shape.dtype.itemsize  # keys may differ in a bit where sines do, values not
    block = int(slots[0]) // layout.block_size
    values = backend.read_block(block)[side : 2 * side]
    found = {"values": values, "query": backend.to_host(q), "key": backend.to_host(k)}
    return {f"rope_write_kv of {num_tokens} {name}": array for name, array in found.items()}


def _dense_results(backend: CudaBackend) -> Results:
    def tensor(*shape: int, seed: int = 0) -> Any:
        return backend.from_host(_floats(*shape, seed=seed))

    weight, x = tensor(64, seed=1), tensor(5, 64)
    table = backend.load_weight(WeightData("F16", (40, 64), _floats(40, 64).astype(np.float16).view(np.uint8)))
    total = tensor(5, 64, seed=2)
    rotated = tensor(5, 2, 64, seed=3)
    rotation = Rotation((10_000.0 ** (-np.arange(32) / 32)).astype(np.float32), interleaved=True)
    backend.rope(rotated, np.array([0, 1, 7, 63, 2000], np.int32), rotation)
    merged = backend.merge_states(tensor(3, 5, 8, 64), tensor(3, 5, 8))
    left, right = backend.split(x, (24, 40))
    logits, seeds = tensor(4, 300, seed=7), np.arange(4, dtype=np.uint64)
    found = {
        "rms_norm": backend.rms_norm(x, weight, 1e-5),
        "add_rms_norm": backend.add_rms_norm(total, x, weight, 1e-5),
        "add": total,
        "silu_mul": backend.silu_mul(x, tensor(5, 64, seed=4)),
        "rope": rotated,
        "sample": backend.sample(logits, np.array([0.0, 0.7, 1.0, 1.3], np.float32), seeds),
        "merge_states output": merged.output,
        "merge_states lse": merged.lse,
        "split left": left,
        "split right": right,
        "embedding": backend.embedding(table, np.array([39, 0, 7], np.int32)),
        "take_rows": backend.take_rows(x, np.array([4, 0, 4], np.int32)),
    }
    if backend._cublas is not None:
        found["linear 16-bit weights"] = backend.linear(x, table)
        found["linear"] = backend.linear(x, tensor(40, 64, seed=5))
    return {name: backend.to_host(array) for name, array in found.items()}
