"""Arrays of other libraries, read through DLPack without a copy.

NumPy takes the capsule over, with its lifetime; types that NumPy has no name for are first called integers of their
size in it, and seen as what they are afterwards.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

_CPU, _PINNED = 1, 3  # DLDeviceType: what this process can read
_UINT = 1  # DLDataTypeCode
_NAMELESS: Final[dict[tuple[int, int], type[Any]]] = {  # (DLDataTypeCode, bits)
    (4, 16): ml_dtypes.bfloat16,
    (8, 8): ml_dtypes.float8_e4m3,
    (10, 8): ml_dtypes.float8_e4m3fn,
    (11, 8): ml_dtypes.float8_e4m3fnuz,
    (12, 8): ml_dtypes.float8_e5m2,
    (13, 8): ml_dtypes.float8_e5m2fnuz,
}


class _Tensor(ctypes.Structure):
    """DLTensor, up to its type."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )


_OFFSETS: Final = {b"dltensor": 0, b"dltensor_versioned": 32}  # of the tensor, behind version, context, deleter, flags
_API = ctypes.pythonapi
_get_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", _API))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _API))


class _Handover:
    """Gives NumPy a capsule that is there already."""

    def __init__(self, capsule: object, device: tuple[int, int]) -> None:
        self._capsule, self._device = capsule, device

    def __dlpack__(self, **_: Any) -> object:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def is_on_device(exporter: Any) -> bool:
    """Whether an object with `__dlpack__` says that it lies where this process cannot read it."""
    return hasattr(exporter, "__dlpack_device__") and exporter.__dlpack_device__()[0] not in (_CPU, _PINNED)


def read_dlpack(exporter: Any) -> npt.NDArray[Any]:
    """Return a view of a host array's elements, which lives as long as anybody needs it."""
    try:
        capsule = exporter.__dlpack__(max_version=(1, 0))
    except TypeError:  # a producer from before version 1
        capsule = exporter.__dlpack__()
    name = _get_name(capsule)
    tensor = _Tensor.from_address(_get_pointer(capsule, name) + _OFFSETS[name])
    if tensor.device_type not in (_CPU, _PINNED):
        raise BufferError(f"its memory is on a device of type {tensor.device_type}")
    real_type = _NAMELESS.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if real_type is not None:
        tensor.code = _UINT
    array = np.from_dlpack(_Handover(capsule, (tensor.device_type, tensor.device_id)))  # type: ignore[arg-type]
    return array if real_type is None else array.view(real_type)
