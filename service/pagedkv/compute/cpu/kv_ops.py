"""The page pool's operations on the CPU: arguments checked in Python, work done by compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pagedkv.compute.backend import AttentionBatch, AttentionParams, AttentionResult, Int64Array
from pagedkv.compute.cpu import validation
from pagedkv.compute.cpu.pool import allocate_pool
from pagedkv.compute.layout import KvLayout
from pagedkv.dtypes import DType

_STORED = {DType.FLOAT32: np.float32, DType.FLOAT16: np.float16, DType.BFLOAT16: ml_dtypes.bfloat16}


class CpuKvOps:
    """`KvOps` over a pool in host memory; not thread-safe, called from the device queue's thread only."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        pool = allocate_pool(layout)
        self._blocks = pool.reshape(layout.num_blocks, layout.block_bytes)
        shape = layout.shape
        axes = (layout.num_blocks, shape.num_layers, 2, shape.num_kv_heads, layout.block_size, shape.head_dim)
        self._view = pool.view(_STORED[shape.dtype]).reshape(axes)

    def write_kv(self, layer: int, keys: Any, values: Any, slot_mapping: Int64Array) -> None:
        """See `KvOps.write_kv`."""
        validation.check_write(self.layout, layer, keys, values, slot_mapping)
        kept = slot_mapping >= 0
        blocks, offsets = np.divmod(slot_mapping[kept], self.layout.block_size)
        self._view[blocks, layer, 0, :, offsets] = keys[kept].astype(self._view.dtype)
        self._view[blocks, layer, 1, :, offsets] = values[kept].astype(self._view.dtype)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """See `KvOps.copy_blocks`; two different sources for one destination are refused."""
        validation.check_copies(self.layout, copies)
        destinations = {destination for _, destination in copies}
        held = {source: self._blocks[source].copy() for source, _ in copies if source in destinations}
        for source, destination in copies:
            self._blocks[destination] = held.get(source, self._blocks[source])

    def attend(self, layer: int, queries: Any, batch: AttentionBatch, params: AttentionParams) -> AttentionResult:
        """See `KvOps.attend`."""
        validation.check_attend(self.layout, layer, queries, batch, params)
        shape = self.layout.shape
        group = shape.group_size
        q = queries.astype(np.float32).reshape(-1, shape.num_kv_heads, group, shape.head_dim)
        output, lse = np.zeros(q.shape, np.float32), np.full(q.shape[:3], -np.inf, np.float32)
        scale = np.float32(shape.head_dim**-0.5 if params.scale is None else params.scale)
        slopes, sinks = (
            None if array is None else np.asarray(array, np.float32).reshape(shape.num_kv_heads, group)
            for array in (params.alibi_slopes, params.sinks)
        )
        for s, context in enumerate(batch.context_lens):
            start, stop = batch.query_starts[s], batch.query_starts[s + 1]
            for row in range(start, stop):
                position = context - stop + row
                first = 0 if params.window is None else max(0, position - params.window + 1)
                tokens = np.arange(first, position + 1)
                blocks = batch.block_tables[s, tokens // self.layout.block_size]
                k, v = (self._view[blocks, layer, part, :, tokens % self.layout.block_size] for part in (0, 1))
                k, v = k.astype(np.float32), v.astype(np.float32)  # [tokens, num_kv_heads, head_dim]
                scores = np.einsum("hgd,thd->hgt", q[row], k) * scale
                if params.soft_cap is not None:
                    scores = params.soft_cap * np.tanh(scores / np.float32(params.soft_cap))
                if slopes is not None:
                    scores = scores + slopes[..., None] * (tokens - position).astype(np.float32)
                peak = scores.max(-1) if sinks is None else np.maximum(scores.max(-1), sinks)
                weights = np.exp(scores - peak[..., None])
                total = weights.sum(-1) + (0 if sinks is None else np.exp(sinks - peak))
                output[row] = np.einsum("hgt,thd->hgd", weights, v) / total[..., None]
                lse[row] = peak + np.log(total)
        return AttentionResult(output.reshape(queries.shape), lse.reshape(queries.shape[:2]))

    def merge_states(self, outputs: Any, lses: Any) -> AttentionResult:
        """See `KvOps.merge_states`."""
        peak = lses.max(0)
        weights = np.exp(lses - np.where(np.isneginf(peak), 0, peak))
        total = weights.sum(0)
        safe = np.where(total > 0, total, 1)
        output = (weights[..., None] * outputs).sum(0) / safe[..., None]
        lse = np.where(total > 0, peak + np.log(safe), -np.inf)
        return AttentionResult(output.astype(np.float32), lse.astype(np.float32))

    def read_block(self, block_id: int) -> npt.NDArray[np.uint8]:
        """See `KvOps.read_block`."""
        validation.check_block_id(self.layout, block_id)
        return self._blocks[block_id].copy()

    def write_block(self, block_id: int, data: npt.NDArray[np.uint8]) -> None:
        """See `KvOps.write_block`."""
        validation.check_block_id(self.layout, block_id)
        validation.check_block_data(self.layout, data)
        self._blocks[block_id] = data
