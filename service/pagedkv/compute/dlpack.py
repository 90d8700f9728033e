"""Views of the page pool that PyTorch, FlashInfer and others take without a copy, by DLPack.

NumPy makes the capsule, over memory that it never touches; what NumPy cannot express is then set in it: the device,
and the element types that it has no name for.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from pagedkv.compute.layout import KvLayout
from pagedkv.config import require
from pagedkv.dtypes import DType

CPU_DEVICE: Final = 1  # DLDeviceType
CUDA_DEVICE: Final = 2


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element: NumPy's name of a type of its size, and DLPack's code."""

    typestr: str
    code: int  # DLDataTypeCode
    bits: int


BYTES: Final = ElementType("|u1", 1, 8)
SCALES: Final = ElementType("<f4", 2, 32)
ELEMENT_TYPES: Final = {
    DType.FLOAT32: SCALES,
    DType.FLOAT16: ElementType("<f2", 2, 16),
    DType.BFLOAT16: ElementType("<u2", 4, 16),
    DType.INT8: ElementType("|i1", 0, 8),
    DType.FLOAT8_E4M3: ElementType("|u1", 10, 8),
}


@dataclass(frozen=True, slots=True)
class Strided:
    """Where a view's elements lie: address of the first, shape, strides in bytes."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element: ElementType


def pool_bytes(layout: KvLayout, pointer: int) -> Strided:
    """Return the pool at `pointer` as uint8 [num_blocks, block_bytes]."""
    return Strided(pointer, (layout.num_blocks, layout.block_bytes), (layout.block_bytes, 1), BYTES)


def layer_elements(layout: KvLayout, pointer: int, layer: int, is_value: bool) -> Strided:
    """Return a layer's K or V as [num_blocks, num_kv_heads, block_size, head_dim]; quantised: without its scales."""
    shape, item = layout.shape, layout.shape.dtype.itemsize
    start = pointer + layout.element_offset(0, _check(layout, layer), is_value, 0, 0) * item
    axes = (layout.num_blocks, shape.num_kv_heads, layout.block_size, shape.head_dim)
    strides = (layout.block_bytes, layout.head_stride * item, shape.head_dim * item, item)
    return Strided(start, axes, strides, ELEMENT_TYPES[shape.dtype])


def layer_scales(layout: KvLayout, pointer: int, layer: int, is_value: bool) -> Strided:
    """Return the scales of a quantised layer's K or V as float32 [num_blocks, num_kv_heads, block_size]."""
    dtype, heads = layout.shape.dtype, layout.shape.num_kv_heads
    require(dtype.is_quantized, "dtype", "has no scales", dtype)
    start = pointer + (_check(layout, layer) * layout.layer_stride + layout.scale_offset) * dtype.itemsize
    axes = (layout.num_blocks, heads, layout.block_size)
    strides = (layout.block_bytes, layout.block_size * 4, 4)
    return Strided(start + is_value * heads * layout.block_size * 4, axes, strides, SCALES)


def _check(layout: KvLayout, layer: int) -> int:
    limit = layout.shape.num_layers
    require(0 <= layer < limit, "layer", f"must be in [0, {limit})", layer, limit - 1)
    return layer


class Exporter(Protocol):
    """Memory that can be lent to other libraries."""

    dlpack_device: tuple[int, int]  # DLDeviceType, number

    def lend(self, stream: Any) -> object:
        """Let the consumer's `stream` see all that was written; the memory lives as long as what is returned.

        Raises BufferError for a stream that makes no sense here, or where the memory is gone.
        """


class PoolView:
    """A strided view with `__dlpack__`. Each capsule, and whatever a consumer makes of it, keeps the memory alive."""

    def __init__(self, memory: Exporter, strided: Strided) -> None:
        self._memory, self.strided = memory, strided

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's type and number of the device."""
        return self._memory.dlpack_device

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Return a capsule, "dltensor" or, where the consumer knows version 1, "dltensor_versioned".

        Raises BufferError for a copy, another device, an unsuitable stream, or memory that is gone.
        """
        device = self._memory.dlpack_device
        if copy:
            raise BufferError("the page pool is lent, not copied")
        if dl_device is not None and tuple(dl_device) != device:
            raise BufferError(f"the page pool lies on device {device}, not on {tuple(dl_device)}")
        is_versioned = max_version is not None and max_version[0] >= 1
        return _make_capsule(self.strided, device, self._memory.lend(stream), is_versioned=is_versioned)


class PoolViews:
    """The views of one pool, whoever owns its memory."""

    layout: KvLayout
    pointer: int  # the pool's first byte

    def view(self, strided: Strided) -> PoolView:
        """Return a view of the pool's memory."""
        raise NotImplementedError

    def layer_view(self, layer: int, is_value: bool) -> PoolView:
        """Return a layer's K or V as [num_blocks, num_kv_heads, block_size, head_dim]."""
        return self.view(layer_elements(self.layout, self.pointer, layer, is_value))

    def scale_view(self, layer: int, is_value: bool) -> PoolView:
        """Return the scales of a quantised layer's K or V as float32 [num_blocks, num_kv_heads, block_size]."""
        return self.view(layer_scales(self.layout, self.pointer, layer, is_value))

    def raw_view(self) -> PoolView:
        """Return the pool as uint8 [num_blocks, block_bytes]."""
        return self.view(pool_bytes(self.layout, self.pointer))


class ArrayPool(PoolViews):
    """A pool in host memory: an array of bytes, which lives as long as any view that was taken of it."""

    dlpack_device = (CPU_DEVICE, 0)

    def __init__(self, layout: KvLayout, memory: npt.NDArray[np.uint8]) -> None:
        self.layout, self.pointer, self._memory = layout, memory.ctypes.data, memory

    def view(self, strided: Strided) -> PoolView:
        """See `PoolViews.view`."""
        return PoolView(self, strided)

    def lend(self, stream: Any) -> object:
        """See `Exporter.lend`; there are no streams."""
        if stream is not None:
            raise BufferError(f"host memory has no streams, got {stream}")
        return self._memory


class _Lent:
    """What NumPy takes for an array, and what the array then keeps alive."""

    def __init__(self, strided: Strided, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "shape": strided.shape,
            "typestr": strided.element.typestr,
            "data": (strided.pointer, False),
            "strides": strided.strides,
            "version": 3,
        }


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


# DLManagedTensorVersioned puts version, context, deleter and flags before the tensor
TENSOR_OFFSETS: Final = {b"dltensor": 0, b"dltensor_versioned": 32}
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _make_capsule(strided: Strided, device: tuple[int, int], owner: object, *, is_versioned: bool) -> object:
    array = np.asarray(_Lent(strided, owner))
    name = b"dltensor_versioned" if is_versioned else b"dltensor"
    capsule: object = array.__dlpack__(max_version=(1, 0)) if is_versioned else array.__dlpack__()
    tensor = _Tensor.from_address(_get_pointer(capsule, name) + TENSOR_OFFSETS[name])
    tensor.device_type, tensor.device_id = device
    tensor.code, tensor.bits = strided.element.code, strided.element.bits
    return capsule
