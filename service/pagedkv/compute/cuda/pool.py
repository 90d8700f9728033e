"""The page pool on the device: one allocation."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.compute.cuda.array import DeviceArray, out_of_memory
from pagedkv.compute.cuda.driver import Context
from pagedkv.compute.layout import KvLayout
from pagedkv.config import require
from pagedkv.dtypes import DType
from pagedkv.errors import DeviceError

_TYPES = {DType.FLOAT32: "<f4", DType.FLOAT16: "<f2", DType.BFLOAT16: "<u2"}  # the interface knows no bfloat16


class DevicePool:
    """Owns the device memory of a layout's blocks."""

    def __init__(self, context: Context, layout: KvLayout) -> None:
        self.layout, self._driver = layout, context.driver
        try:
            self.pointer = int(self._driver.call("cuMemAlloc", layout.pool_bytes))
        except DeviceError as error:
            if "OUT_OF_MEMORY" not in str(error):
                raise
            raise out_of_memory(context, layout.pool_bytes, "the page pool", "--memory or --blocks") from error
        self.free_bytes_left = int(self._driver.call("cuMemGetInfo")[0])

    def layer_pointer(self, layer: int) -> int:
        """Return the address of a layer in block 0."""
        return self.pointer + layer * self.layout.layer_stride * self.layout.shape.dtype.itemsize

    def block_pointer(self, block_id: int) -> int:
        """Return the address of a block."""
        return self.pointer + block_id * self.layout.block_bytes

    def layer_view(self, layer: int, is_value: bool) -> PoolView:
        """Return a layer's K or V as [num_blocks, num_kv_heads, block_size, head_dim] for other libraries."""
        return PoolView(self, layer, is_value)

    def as_bytes(self) -> DeviceArray:
        """Return the pool as uint8 [num_blocks, block_bytes]."""
        shape = (self.layout.num_blocks, self.layout.block_bytes)
        return DeviceArray(self.pointer, shape, np.uint8, self)

    def release(self) -> None:
        """Free the memory; the device must be idle."""
        if self.pointer:
            self._driver.call("cuMemFree", self.pointer)
            self.pointer = 0


class PoolView:
    """A strided view that PyTorch, CuPy and others take without a copy; bfloat16 appears as uint16."""

    def __init__(self, pool: DevicePool, layer: int, is_value: bool) -> None:
        layout, item = pool.layout, pool.layout.shape.dtype.itemsize
        require(layout.shape.dtype in _TYPES, "dtype", "has no type in the array interface", layout.shape.dtype)
        self.pool = pool
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (layout.num_blocks, layout.shape.num_kv_heads, layout.block_size, layout.shape.head_dim),
            "typestr": _TYPES[layout.shape.dtype],
            "data": (pool.layer_pointer(layer) + is_value * layout.value_stride * item, False),
            "strides": (layout.block_bytes, layout.head_stride * item, layout.shape.head_dim * item, item),
            "version": 3,
        }
