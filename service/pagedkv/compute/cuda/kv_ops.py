"""The page pool's operations on a GPU: arguments checked on the host, work done by the kernels of cudasrc."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.compute.backend import (
    AttentionBatch,
    AttentionParams,
    AttentionResult,
    Int32Array,
    Int64Array,
    Rotation,
)
from pagedkv.compute.cpu import validation
from pagedkv.compute.cuda.array import DeviceArray
from pagedkv.compute.cuda.device import Device, require_array
from pagedkv.compute.cuda.kernels import (
    Variant,
    choose_attention,
    plain_variant,
    rope_write_variant,
    storage_code,
    write_variant,
)
from pagedkv.compute.cuda.pool import DevicePool
from pagedkv.compute.layout import KvLayout
from pagedkv.config import require

MAX_PARTITIONS = 32
WAVES = 2  # CTAs to have for each SM before a sequence is not split any further


class CudaKvOps:
    """`KvOps` over a device's pool. `min_partition`: fewest keys that are worth a CTA of their own.

    `tensor_cores` forces the choice of the attention path where the storage type allows it.
    """

    def __init__(
        self, device: Device, layout: KvLayout, *, min_partition: int = 256, tensor_cores: bool | None = None
    ) -> None:
        storage_code(layout.shape.dtype)
        self.layout, self.device = layout, device
        self.pool = DevicePool(device.context, layout, device.streams.compute, device.events)
        self._min_partition, self._tensor_cores = min_partition, tensor_cores
        self._block_shift = layout.block_size.bit_length() - 1
        item = layout.shape.dtype.itemsize
        self._head_bytes, self._value_bytes = layout.head_stride * item, layout.value_stride * item
        self._scale_bytes = layout.scale_offset * item
        strides = (layout.block_bytes, self._head_bytes, self._value_bytes, self._scale_bytes)
        self._pool_arguments = (*strides, self._block_shift, layout.shape.num_kv_heads)

    def write_kv(self, layer: int, keys: DeviceArray, values: DeviceArray, slot_mapping: Int64Array) -> None:
        """See `KvOps.write_kv`."""
        layout, shape = self.layout, self.layout.shape
        validation.check_layer(layout, layer)
        source = self._check_rows(keys, "keys", shape.num_kv_heads)
        same = self._check_rows(values, "values", shape.num_kv_heads) == source and values.shape == keys.shape
        require(same, "values", f"must have the shape and dtype of keys {keys.shape}", values.shape)
        self._check_slots(slot_mapping, len(keys))
        lanes = 32 if shape.dtype.is_quantized else shape.head_dim * shape.dtype.itemsize // 16
        self.device.launch_items(
            write_variant(shape, source),
            2 * len(keys) * shape.num_kv_heads * lanes,
            self.pool.layer_pointer(layer),
            keys.pointer,
            values.pointer,
            self.device.input(slot_mapping, np.int64).pointer,
            len(keys),
            *self._pool_arguments,
        )

    def rope_write_kv(
        self,
        layer: int,
        queries: DeviceArray,
        keys: DeviceArray,
        values: DeviceArray,
        positions: Int32Array,
        slot_mapping: Int64Array,
        rotation: Rotation,
    ) -> None:
        """See `Backend.rope_write_kv`; one launch."""
        self._check_rope_write(layer, (queries, keys, values), positions, slot_mapping, rotation)
        device, shape, num_tokens = self.device, self.layout.shape, len(queries)
        if not num_tokens:
            return
        variant, num_rows = rope_write_variant(shape), shape.num_heads + 2 * shape.num_kv_heads
        parts = min(-(-num_rows * 32 // variant.num_threads), -(-WAVES * device.context.info.num_sms // num_tokens))
        device.launch(
            variant,
            (num_tokens, parts, 1),
            self.pool.layer_pointer(layer),
            queries.pointer,
            keys.pointer,
            values.pointer,
            device.input(positions, np.int32).pointer,
            device.input(slot_mapping, np.int64).pointer,
            device.input(rotation.inv_freq, np.float32).pointer,
            *self._pool_arguments,
            shape.num_heads,
            len(rotation.inv_freq),
            rotation.interleaved,
            rotation.scale,
        )

    def _check_rope_write(
        self,
        layer: int,
        rows: tuple[DeviceArray, DeviceArray, DeviceArray],
        positions: Int32Array,
        slots: Int64Array,
        rotation: Rotation,
    ) -> None:
        shape, num_tokens = self.layout.shape, len(slots)
        validation.check_layer(self.layout, layer)
        for array, field in zip(rows, ("queries", "keys", "values"), strict=True):
            code = self._check_rows(array, field, shape.num_heads if field == "queries" else shape.num_kv_heads)
            require(code == 0, field, "must be float32", str(array.dtype))
            require(len(array) == num_tokens, field, f"must have {num_tokens} tokens", len(array), num_tokens)
        require(len(positions) == num_tokens, "positions", f"must have {num_tokens} entries", len(positions))
        limit = shape.head_dim // 2
        require(
            len(rotation.inv_freq) <= limit, "inv_freq", "has more pairs than a head", len(rotation.inv_freq), limit
        )
        self._check_slots(slots, num_tokens)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """See `KvOps.copy_blocks`; two different sources for one destination are refused."""
        validation.check_copies(self.layout, copies)
        pairs = [(source, target) for source, target in dict.fromkeys(map(tuple, copies)) if source != target]
        written = {target for _, target in pairs}
        held = sorted({source for source, _ in pairs if source in written})
        if not held:
            self._copy(self.pool.pointer, self.pool.pointer, pairs)
            return
        place = {source: index for index, source in enumerate(held)}
        scratch = self.device.scratch.empty((len(held), self.layout.block_bytes), np.uint8)
        self._copy(self.pool.pointer, scratch.pointer, list(place.items()))
        self._copy(self.pool.pointer, self.pool.pointer, [pair for pair in pairs if pair[0] not in place])
        self._copy(scratch.pointer, self.pool.pointer, [(place[a], b) for a, b in pairs if a in place])

    def _copy(self, source: int, target: int, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        variant, pieces = plain_variant("copy_blocks"), self.layout.block_bytes // 16
        for start in range(0, len(pairs), 65535):  # the largest grid.y
            part = np.array(pairs[start : start + 65535], np.int32)
            table = self.device.upload(part)
            width = min(64, -(-pieces // variant.num_threads))
            self.device.launch(variant, (width, len(part), 1), source, target, table.pointer, pieces)

    def attend(
        self, layer: int, queries: DeviceArray, batch: AttentionBatch, params: AttentionParams
    ) -> AttentionResult:
        """See `KvOps.attend`."""
        validation.check_layer(self.layout, layer)
        self._check_rows(queries, "queries", self.layout.shape.num_heads)
        validation.check_params(self.layout, params)
        validation.check_batch(self.layout, batch, params.window)
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
        variant = choose_attention(shape, int(query_lens.max()) * shape.group_size, self._tensor_cores)
        tiles = self.device.derived(batch, lambda: make_tiles(query_lens, shape.group_size, variant.rows))
        grid = (len(tiles), shape.num_kv_heads, self._num_partitions(len(tiles), int(batch.context_lens.max())))
        if grid[2] == 1:
            self._launch_attend(variant, grid, layer, queries, batch, params, (tiles, output, lse))
            return
        outputs = scratch.empty((grid[2], *output.shape), np.float32)
        lses = scratch.empty((grid[2], *lse.shape), np.float32)
        self._launch_attend(variant, grid, layer, queries, batch, params, (tiles, outputs, lses))
        self._merge(outputs, lses, output, lse)

    def _num_partitions(self, num_tiles: int, longest: int) -> int:
        """Return how many CTAs may share a (tile, KV head): enough to fill the device, none with too few keys."""
        wanted = -(-WAVES * self.device.context.info.num_sms // (num_tiles * self.layout.shape.num_kv_heads))
        return max(1, min(wanted, -(-longest // self._min_partition), MAX_PARTITIONS))

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

    def read_block(self, block_id: int) -> npt.NDArray[np.uint8]:
        """See `KvOps.read_block`; the array is valid when the job has completed."""
        validation.check_block_id(self.layout, block_id)
        streams, data = self.device.streams, np.empty(self.layout.block_bytes, np.uint8)
        streams.join(streams.copy, streams.compute)  # behind the kernels that wrote the block
        self.device.copy_out(self.pool.block_pointer(block_id), data, streams.copy)
        streams.join(streams.compute, streams.copy)  # before whatever the block is used for next
        return data

    def write_block(self, block_id: int, data: npt.NDArray[np.uint8]) -> None:
        """See `KvOps.write_block`; `data` may be changed at once."""
        validation.check_block_id(self.layout, block_id)
        validation.check_block_data(self.layout, data)
        streams = self.device.streams
        streams.join(streams.copy, streams.compute)
        self.device.copy_in(self.pool.block_pointer(block_id), np.ascontiguousarray(data), streams.copy)
        streams.join(streams.compute, streams.copy)

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

    def _check_slots(self, slots: Int64Array, num_tokens: int) -> None:
        require(np.shape(slots) == (num_tokens,), "slot_mapping", f"must have shape ({num_tokens},)", np.shape(slots))
        limit = self.layout.num_blocks * self.layout.block_size
        if num_tokens:
            low, high = int(slots.min()), int(slots.max())
            require(low >= -1 and high < limit, "slot_mapping", f"must be in [-1, {limit})", (low, high), limit - 1)


def make_tiles(query_lens: npt.NDArray[np.integer[Any]], group_size: int, rows: int) -> npt.NDArray[np.int32]:
    """Return [num_tiles, 2]: the sequence of each query tile and the tile's number in it."""
    counts = -(-query_lens.astype(np.int64) * group_size // rows)
    sequences = np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([sequences, numbers], axis=1).astype(np.int32)
