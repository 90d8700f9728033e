"""The page pool's operations on a GPU: arguments checked on the host, work done by the kernels of cudasrc."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagedkv.compute.backend import (
    Int32Array,
    Int64Array,
    Rotation,
)
from pagedkv.compute.cpu import validation
from pagedkv.compute.cuda.array import DeviceArray
from pagedkv.compute.cuda.attention import CudaAttention
from pagedkv.compute.cuda.kernels import (
    plain_variant,
    rope_write_variant,
    write_variant,
)
from pagedkv.config import require

ROPE_CTAS = 8  # CTAs to have for each SM before a token's heads are not divided any further


class CudaKvOps(CudaAttention):
    """`KvOps` over a device's pool."""

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
        parts = min(-(-num_rows * 32 // variant.num_threads), -(-ROPE_CTAS * device.context.info.num_sms // num_tokens))
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

    def _check_slots(self, slots: Int64Array, num_tokens: int) -> None:
        require(np.shape(slots) == (num_tokens,), "slot_mapping", f"must have shape ({num_tokens},)", np.shape(slots))
        if num_tokens:
            self.device.check(("slots", id(slots)), slots, lambda: self._check_slot_range(slots))

    def _check_slot_range(self, slots: Int64Array) -> None:
        limit = self.layout.num_blocks * self.layout.block_size
        low, high = int(slots.min()), int(slots.max())
        require(low >= -1 and high < limit, "slot_mapping", f"must be in [-1, {limit})", (low, high), limit - 1)
