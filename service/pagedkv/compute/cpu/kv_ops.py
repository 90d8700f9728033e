"""The page pool's operations on the CPU: arguments checked in Python, work done by compiled kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagedkv.compute.backend import AttentionBatch, AttentionParams, AttentionResult, Int64Array
from pagedkv.compute.cpu import attention_steps, merge_kernel, threads, validation, write_kernel
from pagedkv.compute.cpu.attention import ARRAY_KINDS, POOL_KINDS, Attention, compile_attention
from pagedkv.compute.cpu.compile_cache import Kernel, compile_kernel
from pagedkv.compute.cpu.features import Isa
from pagedkv.compute.cpu.pool import allocate_host_pool, allocate_pool
from pagedkv.compute.cpu.threads import Recording, WorkerPool
from pagedkv.compute.dlpack import ArrayPool
from pagedkv.compute.layout import KvLayout
from pagedkv.compute.swap import check_pairs, join_pairs

_SOURCES: Final = (str(threads.__file__), str(attention_steps.__file__))


class CpuKvOps:
    """`KvOps` over a pool in host memory; called from the device queue's thread."""

    def __init__(self, layout: KvLayout, isa: Isa, workers: WorkerPool, num_host_blocks: int = 0) -> None:
        self.layout, self.num_host_blocks = layout, num_host_blocks
        self._isa, self._workers = isa, workers
        self._pool = allocate_pool(layout, num_host_blocks)
        self.pool = ArrayPool(layout, self._pool)  # for other libraries
        self._host_blocks = allocate_host_pool(layout, num_host_blocks)
        self._blocks = self._pool.reshape(layout.num_blocks, layout.block_bytes)
        self._kernels: dict[str, Kernel] = {}
        self._attention: Attention | None = None
        self._layer_bytes = layout.layer_stride * layout.shape.dtype.itemsize
        self._write_args = self._make_write_args()
        self._replayed_slots: Int64Array | None = None  # of the record that was made last

    def kernel_makers(self) -> dict[str, Callable[[], Kernel]]:
        """Return a name and a maker for each kernel that these operations use."""
        isa, dtype = self._isa, self.layout.shape.dtype
        kind = POOL_KINDS[dtype]
        write = write_kernel.make_write_kernel(isa.width, kind)
        merge = merge_kernel.make_merge_kernel(isa.width)
        return {
            "attend": lambda: compile_attention(isa, dtype),
            "write": lambda: compile_kernel(write, f"write-{isa.name}-{dtype}", (isa.width, kind), _SOURCES),
            "merge": lambda: compile_kernel(merge, f"merge-{isa.name}", (isa.width,), _SOURCES),
        }

    def _kernel(self, name: str) -> Kernel:
        if name not in self._kernels:
            self._kernels[name] = self.kernel_makers()[name]()
        return self._kernels[name]

    def write_kv(self, layer: int, keys: Any, values: Any, slot_mapping: Int64Array) -> None:
        """See `KvOps.write_kv`."""
        validation.check_write(self.layout, layer, keys, values, slot_mapping)
        if not len(keys):
            return
        given = (keys, values, slot_mapping)
        keys, values = np.ascontiguousarray(keys), np.ascontiguousarray(values)
        slots = np.ascontiguousarray(slot_mapping, dtype=np.int64)
        if (recording := self._workers.recording) is not None:
            if not (keys is given[0] and values is given[1] and slots is given[2]):
                recording.give_up()
            self._check_before_replay(recording, slots)
        args = self._write_args.copy()
        args[1] = -(-len(keys) // write_kernel.ITEM_TOKENS)
        args[write_kernel.POOL // 8] += layer * self._layer_bytes
        args[write_kernel.KEYS // 8] = keys.ctypes.data
        args[write_kernel.VALUES // 8] = values.ctypes.data
        args[write_kernel.SOURCE_KIND // 8] = ARRAY_KINDS[keys.dtype]
        args[write_kernel.SLOTS // 8] = slots.ctypes.data
        args[write_kernel.NUM_TOKENS // 8] = len(keys)
        self._workers.run(self._kernel("write"), args, parallel=args[1] > 1)

    def _check_before_replay(self, recording: Recording, slots: Int64Array) -> None:
        """Have a repeated step refuse slots outside the pool; the layers of a step share them."""
        if self._replayed_slots is not slots:
            self._replayed_slots = slots
            recording.before_replay(partial(validation.check_slots, self.layout, slots))

    def _make_write_args(self) -> npt.NDArray[np.int64]:
        """Return the argument words that every write shares."""
        layout, shape = self.layout, self.layout.shape
        item = shape.dtype.itemsize
        words = {
            write_kernel.POOL: self._pool.ctypes.data,
            write_kernel.NUM_KV_HEADS: shape.num_kv_heads,
            write_kernel.HEAD_DIM: shape.head_dim,
            write_kernel.BLOCK_SIZE: layout.block_size,
            write_kernel.BLOCK_BYTES: layout.block_bytes,
            write_kernel.VALUE_BYTES: layout.value_stride * item,
            write_kernel.HEAD_BYTES: layout.head_stride * item,
            write_kernel.SCALE_BYTES: layout.scale_offset * item,
        }
        return _args(write_kernel.NUM_WORDS, words)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """See `KvOps.copy_blocks`; two different sources for one destination are refused."""
        validation.check_copies(self.layout, copies)
        destinations = {destination for _, destination in copies}
        held = {source: self._blocks[source].copy() for source, _ in copies if source in destinations}
        for source, destination in copies:
            self._blocks[destination] = held.get(source, self._blocks[source])

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `KvOps.swap_out`."""
        check_pairs(self.layout, self.num_host_blocks, pairs)
        for device, host, length in join_pairs(pairs):
            self._host_blocks[host : host + length] = self._blocks[device : device + length]

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `KvOps.swap_in`."""
        check_pairs(self.layout, self.num_host_blocks, pairs)
        for device, host, length in join_pairs(pairs):
            self._blocks[device : device + length] = self._host_blocks[host : host + length]

    def attend(self, layer: int, queries: Any, batch: AttentionBatch, params: AttentionParams) -> AttentionResult:
        """See `KvOps.attend`."""
        if self._attention is None:
            kernel = self._kernel("attend")
            self._attention = Attention(self.layout, self._pool.ctypes.data, kernel, self._workers)
        validation.check_call(self.layout, layer, queries, params)
        check_batch = partial(validation.check_batch, self.layout)
        return self._attention.run(layer, queries, batch, params, check_batch)

    def merge_states(self, outputs: Any, lses: Any) -> AttentionResult:
        """See `KvOps.merge_states`."""
        validation.check_parts(self.layout, outputs, lses)
        outputs, lses = np.ascontiguousarray(outputs), np.ascontiguousarray(lses)
        output, lse = np.empty(outputs.shape[1:], np.float32), np.empty(lses.shape[1:], np.float32)
        if lse.size:
            words = {
                8: lse.size,
                merge_kernel.PARTS: outputs.ctypes.data,
                merge_kernel.PART_LSES: lses.ctypes.data,
                merge_kernel.OUTPUT: output.ctypes.data,
                merge_kernel.LSE: lse.ctypes.data,
                merge_kernel.NUM_PARTS: len(lses),
                merge_kernel.HEAD_DIM: self.layout.shape.head_dim,
            }
            self._workers.run(self._kernel("merge"), _args(merge_kernel.NUM_WORDS, words))
        return AttentionResult(output, lse)

    def read_block(self, block_id: int) -> npt.NDArray[np.uint8]:
        """See `KvOps.read_block`."""
        validation.check_block_id(self.layout, block_id)
        return self._blocks[block_id].copy()

    def write_block(self, block_id: int, data: npt.NDArray[np.uint8]) -> None:
        """See `KvOps.write_block`."""
        validation.check_block_id(self.layout, block_id)
        validation.check_block_data(self.layout, data)
        self._blocks[block_id] = data


def _args(num_words: int, words: dict[int, int]) -> npt.NDArray[np.int64]:
    """Return kernel arguments from a mapping of byte offsets."""
    args = np.zeros(num_words, np.int64)
    for offset, value in words.items():
        args[offset // 8] = value
    return args
