"""A backend in plain NumPy: an independent reference for the decoder and for the real backends.

It shares no code with them: weights are dequantised by the `gguf` package, attention is a loop over sequences. It
computes in `dtype` (float32 or float64) and runs each job at once on the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from pagedkv.compute.backend import AttentionBatch, AttentionParams, AttentionResult, Rotation, WeightData
from pagedkv.compute.layout import KvLayout

_PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class NumpyBackend:
    """Implements `Backend`. `num_weights_loaded` counts `load_weight` calls; slots nobody wrote hold NaN."""

    name = "cpu"
    repeats_prompts = False

    def __init__(self, layout: KvLayout, dtype: type = np.float32, num_host_blocks: int = 0) -> None:
        self.layout, self.num_host_blocks = layout, num_host_blocks
        self.num_weights_loaded = 0
        self._dtype = dtype
        shape = layout.shape
        axes = (layout.num_blocks, shape.num_layers, 2, shape.num_kv_heads, layout.block_size, shape.head_dim)
        self.pool = np.full(axes, np.nan, dtype)
        self.host_pool = np.full((num_host_blocks, *axes[1:]), np.nan, dtype)

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)
        return future

    def repeat(
        self,
        shape: Any,
        inputs: Sequence[Any],
        body: Callable[[Sequence[Any]], Any],
        finish: Callable[[Any], Any] = lambda result: result,
        padding: Sequence[int] = (),
    ) -> Any:
        return finish(body(inputs))

    def from_host(self, array: Any) -> Any:
        return array

    def to_host(self, tensor: Any) -> Any:
        return tensor

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass

    def stored_kind(self, kind: str) -> str:
        return kind if kind in _PLAIN else "F32"

    def load_weight(self, weight: WeightData) -> np.ndarray:
        self.num_weights_loaded += 1
        if weight.kind in _PLAIN:
            return weight.data.view(_PLAIN[weight.kind]).reshape(weight.shape).astype(self._dtype)
        rows = weight.data.reshape(weight.shape[0], -1)
        values = dequantize(rows, GGMLQuantizationType[weight.kind])
        return values.reshape(weight.shape).astype(self._dtype, copy=False)

    def embedding(self, table: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        return table[token_ids].copy()

    def linear(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        y = x @ weight.T
        return y if bias is None else y + bias

    def linear_many(
        self, x: np.ndarray, weights: Sequence[np.ndarray], biases: Sequence[np.ndarray | None] | None = None
    ) -> list[np.ndarray]:
        return [self.linear(x, *pair) for pair in zip(weights, biases or [None] * len(weights), strict=True)]

    def add_rms_norm(self, x: Any, y: Any, weight: Any, epsilon: float, readers: Sequence[Any] = ()) -> np.ndarray:
        x += y
        return self.rms_norm(x, weight, epsilon)

    def rms_norm(self, x: Any, weight: Any, epsilon: float, readers: Sequence[Any] = ()) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self._dtype(epsilon)) * weight

    def add(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        x += y
        return x

    def silu_mul(self, gate: np.ndarray, up: np.ndarray, readers: Sequence[Any] = ()) -> np.ndarray:
        return gate / (1 + np.exp(-gate)) * up

    def rope(self, x: np.ndarray, positions: np.ndarray, rotation: Rotation) -> None:
        half = len(rotation.inv_freq)
        angles = positions[:, None].astype(np.float64) * rotation.inv_freq
        cos, sin = (f(angles)[:, None].astype(self._dtype) * self._dtype(rotation.scale) for f in (np.cos, np.sin))
        pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)), (slice(half), slice(half, 2 * half))
        first, second = pairs[0] if rotation.interleaved else pairs[1]
        a, b = x[..., first].copy(), x[..., second].copy()
        x[..., first], x[..., second] = a * cos - b * sin, a * sin + b * cos

    def take_rows(self, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return x[rows]

    def split(self, x: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
        return [np.ascontiguousarray(part) for part in np.split(x, np.cumsum(sizes)[:-1], axis=-1)]

    def write_kv(self, layer: int, keys: np.ndarray, values: np.ndarray, slot_mapping: np.ndarray) -> None:
        for key, value, slot in zip(keys, values, slot_mapping, strict=True):
            if slot >= 0:
                block, offset = divmod(int(slot), self.layout.block_size)
                self.pool[block, layer, 0, :, offset] = key
                self.pool[block, layer, 1, :, offset] = value

    def rope_write_kv(
        self,
        layer: int,
        queries: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        positions: np.ndarray,
        slot_mapping: np.ndarray,
        rotation: Rotation,
    ) -> None:
        for rotated in (queries, keys):
            self.rope(rotated, positions, rotation)
        self.write_kv(layer, keys, values, slot_mapping)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        sources = self.pool[[source for source, _ in copies]]
        self.pool[[destination for _, destination in copies]] = sources

    def attend(
        self, layer: int, queries: np.ndarray, batch: AttentionBatch, params: AttentionParams
    ) -> AttentionResult:
        assert params.alibi_slopes is None
        assert params.sinks is None
        assert params.soft_cap is None
        output = np.zeros_like(queries)
        lse = np.full(queries.shape[:2], -np.inf, self._dtype)
        for index, context in enumerate(batch.context_lens.tolist()):
            rows = slice(int(batch.query_starts[index]), int(batch.query_starts[index + 1]))
            if rows.stop > rows.start:
                keys, values = self._gather(layer, batch.block_tables[index], context)
                output[rows], lse[rows] = _attend_one(queries[rows], keys, values, params)
        return AttentionResult(output, lse)

    def merge_states(self, outputs: np.ndarray, lses: np.ndarray) -> AttentionResult:
        lse = np.logaddexp.reduce(lses, axis=0)
        weights = np.exp(lses - lse)[..., None]
        return AttentionResult((weights * outputs).sum(0), lse)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        for device, host in pairs:
            self.host_pool[host] = self.pool[device]

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        for device, host in pairs:
            self.pool[device] = self.host_pool[host]

    def read_block(self, block_id: int) -> np.ndarray:
        return self.pool[block_id].copy().view(np.uint8).reshape(-1)

    def write_block(self, block_id: int, data: np.ndarray) -> None:
        self.pool[block_id] = data.view(self._dtype).reshape(self.pool.shape[1:])

    def _gather(self, layer: int, table: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
        """Return K and V [num_kv_heads, context, head_dim] of one sequence."""
        blocks = table[: -(-context // self.layout.block_size)]
        tiles = self.pool[blocks, layer]  # [blocks, 2, num_kv_heads, block_size, head_dim]
        joined = tiles.transpose(1, 2, 0, 3, 4).reshape(2, self.layout.shape.num_kv_heads, -1, tiles.shape[-1])
        return joined[0, :, :context], joined[1, :, :context]


def _attend_one(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, params: AttentionParams
) -> tuple[np.ndarray, np.ndarray]:
    """Attend one sequence's newest queries [n, num_heads, head_dim] to its K and V."""
    num_queries, num_heads, head_dim = queries.shape
    num_kv_heads, context = keys.shape[:2]
    grouped = queries.reshape(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim).transpose(1, 2, 0, 3)
    scale = queries.dtype.type(head_dim**-0.5 if params.scale is None else params.scale)
    scores = grouped @ keys[:, None].transpose(0, 1, 3, 2) * scale  # [kv head, group, query, key]
    positions = np.arange(context - num_queries, context)[:, None]
    seen = np.arange(context) <= positions
    if params.window is not None:
        seen &= np.arange(context) > positions - params.window
    scores = np.where(seen, scores, queries.dtype.type(-np.inf))
    peak = scores.max(-1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    output = (weights / total) @ values[:, None]
    lse = (peak + np.log(total))[..., 0]
    return (
        output.transpose(2, 0, 1, 3).reshape(queries.shape),
        lse.transpose(2, 0, 1).reshape(num_queries, num_heads),
    )
