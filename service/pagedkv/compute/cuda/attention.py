"""Attention over the page pool on a GPU: arguments checked on the host, work done by the kernels of cudasrc."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.compute.backend import AttentionBatch, AttentionParams, AttentionResult
from pagedkv.compute.cpu import validation
from pagedkv.compute.cuda.array import DeviceArray
from pagedkv.compute.cuda.device import Device, require_array
from pagedkv.compute.cuda.kernels import Variant, choose_attention, plain_variant, storage_code
from pagedkv.compute.cuda.pool import DevicePool
from pagedkv.compute.layout import KvLayout
from pagedkv.config import require

MAX_PARTITIONS = 128
KEY_GRAIN = 64  # a part is a multiple of a tile's keys
FIXED_KEYS = 64  # what begin and end of a CTA cost, in keys


class CudaAttention:
    """Attention over a device's pool, once that is open. `min_partition`: fewest keys worth a CTA of their own.

    `tensor_cores` forces the choice of the attention path where the storage type allows it.
    """

    def __init__(
        self, device: Device, layout: KvLayout, *, min_partition: int = 256, tensor_cores: bool | None = None
    ) -> None:
        storage_code(layout.shape.dtype)
        self.layout, self.device = layout, device
        self._min_partition, self._tensor_cores = min_partition, tensor_cores
        self._block_shift = layout.block_size.bit_length() - 1
        item = layout.shape.dtype.itemsize
        self._head_bytes, self._value_bytes = layout.head_stride * item, layout.value_stride * item
        self._scale_bytes = layout.scale_offset * item
        strides = (layout.block_bytes, self._head_bytes, self._value_bytes, self._scale_bytes)
        self._pool_arguments = (*strides, self._block_shift, layout.shape.num_kv_heads)

    def open_pool(self, layout: KvLayout) -> None:
        """Take the pool's memory; `layout` differs from the one given at first in the number of blocks alone."""
        self.pool = DevicePool(self.device.context, layout, self.device.streams.compute, self.device.events)
        self.layout = layout

    def attend(
        self, layer: int, queries: DeviceArray, batch: AttentionBatch, params: AttentionParams
    ) -> AttentionResult:
        """See `KvOps.attend`."""
        validation.check_layer(self.layout, layer)
        self._check_rows(queries, "queries", self.layout.shape.num_heads)
        validation.check_params(self.layout, params)
        may_pad = self.device.recording is not None
        check_key = ("batch", id(batch.block_tables), params.window)
        self.device.check(check_key, lambda: self._check_batch(batch, params.window, may_pad=may_pad))
        last = int(batch.query_starts[-1])
        require(last == len(queries), "query_starts", f"must end at the number of queries ({len(queries)})", last)
        output = self.device.scratch.empty(queries.shape, np.float32)
        lse = self.device.scratch.empty(queries.shape[:2], np.float32)
        if last:
            self._attend(layer, self.as_float32(queries), batch, params, output, lse)
        return AttentionResult(output, lse)

    def _attend(
        self,
        layer: int,
        queries: DeviceArray,
        batch: AttentionBatch,
        params: AttentionParams,
        output: DeviceArray,
        lse: DeviceArray,
    ) -> None:
        shape, scratch = self.layout.shape, self.device.scratch
        query_lens = np.diff(batch.query_starts)
        limit = self.device.context.info.shared_bytes
        variant = choose_attention(shape, int(query_lens.max()) * shape.group_size, self._tensor_cores, limit)
        tiles = self.device.derived(batch, lambda: make_tiles(query_lens, shape.group_size, variant.rows))
        grid = (len(tiles), shape.num_kv_heads, self._num_partitions(variant, len(tiles), self._longest(batch)))
        if grid[2] == 1:
            self._launch_attend(variant, grid, layer, queries, batch, params, (tiles, output, lse))
            return
        outputs = scratch.empty((grid[2], *output.shape), np.float32)
        lses = scratch.empty((grid[2], *lse.shape), np.float32)
        self._launch_attend(variant, grid, layer, queries, batch, params, (tiles, outputs, lses))
        self._merge(outputs, lses, output, lse)

    def _check_batch(self, batch: AttentionBatch, window: int | None, *, may_pad: bool) -> None:
        """Check a batch; in a repeated step a context of 0 is padding, whatever its queries."""
        if may_pad:
            lens = np.where(batch.context_lens == 0, np.diff(batch.query_starts), batch.context_lens)
            batch = replace(batch, context_lens=lens)
        validation.check_batch(self.layout, batch, window)

    def _longest(self, batch: AttentionBatch) -> int:
        """Return the longest context; in a recorded step the longest that its tables can hold."""
        if self.device.recording is None:
            return int(batch.context_lens.max())
        return batch.block_tables.shape[1] * self.layout.block_size

    def _num_partitions(self, variant: Variant, num_tiles: int, longest: int) -> int:
        """Return how many CTAs share a (tile, KV head): so many that the device is filled, none with too few keys."""
        ctas_per_sm = self.device.function(variant).ctas_per_sm(variant.num_threads)
        slots = self.device.context.info.num_sms * ctas_per_sm
        return choose_partitions(num_tiles * self.layout.shape.num_kv_heads, slots, longest, self._min_partition)

    def _launch_attend(
        self,
        variant: Variant,
        grid: tuple[int, int, int],
        layer: int,
        queries: DeviceArray,
        batch: AttentionBatch,
        params: AttentionParams,
        arrays: tuple[DeviceArray, DeviceArray, DeviceArray],
    ) -> None:
        device, shape = self.device, self.layout.shape
        optional = [
            None if array is None else device.input(array, np.float32) for array in (params.alibi_slopes, params.sinks)
        ]
        device.launch(
            variant,
            grid,
            self.pool.layer_pointer(layer),
            queries.pointer,
            device.input(batch.block_tables, np.int32).pointer,
            device.input(batch.context_lens, np.int32).pointer,
            device.input(batch.query_starts, np.int32).pointer,
            arrays[0].pointer,
            *(0 if array is None else array.pointer for array in optional),
            arrays[1].pointer,
            arrays[2].pointer,
            batch.block_tables.shape[1],
            len(queries),
            self.layout.block_bytes,
            self._head_bytes,
            self._value_bytes,
            self._scale_bytes,
            self._block_shift,
            shape.num_heads,
            shape.num_kv_heads,
            self._min_partition,
            min(params.window or 0, 2**31 - 1),
            shape.head_dim**-0.5 if params.scale is None else params.scale,
            params.soft_cap or 0.0,
        )

    def merge_states(self, outputs: DeviceArray, lses: DeviceArray) -> AttentionResult:
        """See `KvOps.merge_states`."""
        shape = self.layout.shape
        for field, array in (("outputs", outputs), ("lses", lses)):
            require(require_array(array, field) == 0, field, "must be float32", str(array.dtype))
        fits = outputs.ndim == 4 and len(outputs) >= 1 and outputs.shape[2:] == (shape.num_heads, shape.head_dim)
        expected = f"[num_parts, num_queries, {shape.num_heads}, {shape.head_dim}]"
        require(fits, "outputs", f"must have shape {expected}", outputs.shape, expected)
        require(lses.shape == outputs.shape[:3], "lses", f"must have shape {outputs.shape[:3]}", lses.shape)
        output = self.device.scratch.empty(outputs.shape[1:], np.float32)
        lse = self.device.scratch.empty(lses.shape[1:], np.float32)
        self._merge(outputs, lses, output, lse)
        return AttentionResult(output, lse)

    def _merge(self, outputs: DeviceArray, lses: DeviceArray, output: DeviceArray, lse: DeviceArray) -> None:
        pointers = (outputs.pointer, lses.pointer, output.pointer, lse.pointer)
        variant = plain_variant("merge_states")
        self.device.launch_items(variant, lse.size * 32, *pointers, lse.size, len(lses), output.shape[-1])

    def as_float32(self, array: DeviceArray) -> DeviceArray:
        """Return the array itself if it is float32, else a converted copy."""
        return self.cast(array, 0)

    def cast(self, array: DeviceArray, code: int) -> DeviceArray:
        """Return the array in the type of a storage code; itself if it has it."""
        source = require_array(array, "array")
        if source == code:
            return array
        target = self.device.scratch.empty(array.shape, np.float32 if code == 0 else np.uint16)
        variant = plain_variant("cast", SOURCE=source, TARGET=code)
        self.device.launch_items(variant, array.size, array.pointer, target.pointer, array.size)
        return target

    def _check_rows(self, array: Any, field: str, num_heads: int) -> int:
        code = require_array(array, field)
        expected = f"[num_tokens, {num_heads}, {self.layout.shape.head_dim}]"
        fits = array.ndim == 3 and array.shape[1:] == (num_heads, self.layout.shape.head_dim)
        require(fits, field, f"must have shape {expected}", array.shape, expected)
        return code


def choose_partitions(num_items: int, slots: int, num_keys: int, min_partition: int) -> int:
    """Return into how many parts `num_items` of `num_keys` keys are divided, that `slots` of them run at a time.

    The one with the least time: as many rounds as fill the slots, times the keys of a part.
    """
    most = max(1, min(-(-num_keys // min_partition), MAX_PARTITIONS))

    def time(parts: int) -> int:
        length = max(min_partition, -(-num_keys // parts))
        return -(-num_items * parts // slots) * (-(-length // KEY_GRAIN) * KEY_GRAIN + FIXED_KEYS)

    return min(range(1, most + 1), key=time)


def make_tiles(query_lens: npt.NDArray[np.integer[Any]], group_size: int, rows: int) -> npt.NDArray[np.int32]:
    """Return [num_tiles, 2]: the sequence of each query tile and the tile's number in it, the last one first.

    A later tile sees more keys; the short ones, started last, fill up the device's end.
    """
    counts = -(-query_lens.astype(np.int64) * group_size // rows)
    sequences = np.repeat(np.arange(len(counts)), counts)
    numbers = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(sequences))
    return np.stack([sequences, numbers], axis=1).astype(np.int32)
