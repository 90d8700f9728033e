"""Attention over the page pool on a GPU: arguments checked on the host, work done by the kernels of cudasrc."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pagedkv.compute.backend import AttentionBatch, AttentionParams, AttentionResult
from pagedkv.compute.cpu import validation
from pagedkv.compute.cuda.array import DeviceArray
from pagedkv.compute.cuda.device import Device, require_array
from pagedkv.compute.cuda.kernels import Variant, choose_attention, plain_variant, storage_code
from pagedkv.compute.cuda.plan import Share, choose_partitions, divide, make_tiles
from pagedkv.compute.cuda.pool import DevicePool
from pagedkv.compute.layout import KvLayout
from pagedkv.config import require


@dataclass(frozen=True, slots=True)
class _Launch:
    """A share of a batch with its arrays on the device. Where `rows` is None it is the whole batch."""

    variant: Variant
    grid: tuple[int, int, int]
    num_queries: int
    tiles: DeviceArray
    starts: DeviceArray  # of the sequences' outputs
    rows: DeviceArray | None  # where the outputs of partitions are to go, merged


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
        device, arrays = self.device, (batch.block_tables, batch.context_lens, batch.query_starts)
        validation.check_layer(self.layout, layer)
        self._check_rows(queries, "queries", self.layout.shape.num_heads)
        device.once(("params", id(params)), params, lambda: validation.check_params(self.layout, params))
        may_pad = device.recording is not None
        key = ("batch", *map(id, arrays), params.window)
        device.check(key, arrays, lambda: self._check_batch(batch, params.window, may_pad=may_pad))
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
        scratch, window = self.device.scratch, params.window
        for launch in self.device.once(("plan", id(batch), window), batch, lambda: self._plan(batch, window)):
            if launch.grid[2] == 1:
                self._launch_attend(launch, layer, queries, batch, params, (output, lse))
                continue
            outputs = scratch.empty((launch.grid[2], launch.num_queries, *output.shape[1:]), np.float32)
            lses = scratch.empty(outputs.shape[:3], np.float32)
            self._launch_attend(launch, layer, queries, batch, params, (outputs, lses))
            self._merge(outputs, lses, output, lse, launch.rows)

    def _plan(self, batch: AttentionBatch, window: int | None) -> list[_Launch]:
        """Return the launches of a batch; a layer with another window has others."""
        shape, limit = self.layout.shape, self.device.context.info.shared_bytes
        capacity = None if self.device.recording is None else batch.block_tables.shape[1] * self.layout.block_size
        shares = divide(
            batch,
            shape.group_size,
            window,
            lambda rows: choose_attention(shape, rows, self._tensor_cores, limit),
            capacity,
        )
        return [self._prepare(share, batch, is_whole=len(shares) == 1) for share in shares]

    def _prepare(self, share: Share, batch: AttentionBatch, *, is_whole: bool) -> _Launch:
        device, shape = self.device, self.layout.shape
        tiles = device.upload(make_tiles(share.query_lens, shape.group_size, share.variant.rows))
        grid = (len(tiles), shape.num_kv_heads, self._num_partitions(share.variant, len(tiles), share.longest))
        starts, num_queries = device.input(batch.query_starts, np.int32), int(batch.query_starts[-1])
        if is_whole or grid[2] == 1:  # outputs lie where they belong
            return _Launch(share.variant, grid, num_queries, tiles, starts, None)
        rows = device.upload(share.rows(np.diff(batch.query_starts)))
        return _Launch(share.variant, grid, share.num_queries, tiles, device.upload(share.starts), rows)

    def _check_batch(self, batch: AttentionBatch, window: int | None, *, may_pad: bool) -> None:
        """Check a batch; in a repeated step a context of 0 is padding, whatever its queries."""
        if may_pad:
            lens = np.where(batch.context_lens == 0, np.diff(batch.query_starts), batch.context_lens)
            batch = replace(batch, context_lens=lens)
        validation.check_batch(self.layout, batch, window)

    def _num_partitions(self, variant: Variant, num_tiles: int, longest: int) -> int:
        """Return how many CTAs share a (tile, KV head): so many that the device is filled, none with too few keys."""
        ctas_per_sm = self.device.function(variant).ctas_per_sm(variant.num_threads)
        slots = self.device.context.info.num_sms * ctas_per_sm
        return choose_partitions(num_tiles * self.layout.shape.num_kv_heads, slots, longest, self._min_partition)

    def _launch_attend(
        self,
        launch: _Launch,
        layer: int,
        queries: DeviceArray,
        batch: AttentionBatch,
        params: AttentionParams,
        results: tuple[DeviceArray, DeviceArray],
    ) -> None:
        device, shape = self.device, self.layout.shape
        optional = [
            None if array is None else device.input(array, np.float32) for array in (params.alibi_slopes, params.sinks)
        ]
        device.launch(
            launch.variant,
            launch.grid,
            self.pool.layer_pointer(layer),
            queries.pointer,
            device.input(batch.block_tables, np.int32).pointer,
            device.input(batch.context_lens, np.int32).pointer,
            device.input(batch.query_starts, np.int32).pointer,
            launch.starts.pointer,
            launch.tiles.pointer,
            *(0 if array is None else array.pointer for array in optional),
            *(result.pointer for result in results),
            batch.block_tables.shape[1],
            launch.num_queries,
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

    def _merge(
        self,
        outputs: DeviceArray,
        lses: DeviceArray,
        output: DeviceArray,
        lse: DeviceArray,
        rows: DeviceArray | None = None,
    ) -> None:
        """Merge partitions into `output` and `lse`: query i goes to row `rows[i]`, or i."""
        pointers = (outputs.pointer, lses.pointer, 0 if rows is None else rows.pointer, output.pointer, lse.pointer)
        sizes = (lses.shape[1] * lses.shape[2], len(lses), *output.shape[1:])
        self.device.launch_items(plain_variant("merge_states"), sizes[0] * 32, *pointers, *sizes)

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
