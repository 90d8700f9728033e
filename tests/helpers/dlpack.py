"""A consumer of DLPack capsules in ctypes, after dlpack.h: what PyTorch's `from_dlpack` does, without a device."""

from __future__ import annotations

import ctypes
from typing import Any

from pagedkv.compute.dlpack import TENSOR_OFFSETS

_API = ctypes.pythonapi
_get_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", _API))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _API))
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", _API))
_USED = {b"dltensor": b"used_dltensor", b"dltensor_versioned": b"used_dltensor_versioned"}
_DELETERS = {b"dltensor": 56, b"dltensor_versioned": 16}  # offset of the deleter


class Consumed:
    """A taken capsule: its fields, and `close` as the consumer's last use."""

    def __init__(self, capsule: Any) -> None:
        name = _get_name(capsule)
        self.name = name.decode()
        self._address = _get_pointer(capsule, name)
        self._deleter = _DELETERS[name]
        _set_name(capsule, _USED[name])
        tensor = self._address + TENSOR_OFFSETS[name]
        fields = (ctypes.c_int32 * 3).from_address(tensor + 8)
        self.pointer = (ctypes.c_uint64).from_address(tensor).value
        self.device, ndim = (fields[0], fields[1]), fields[2]
        self.type = tuple((ctypes.c_uint8 * 2).from_address(tensor + 20))
        self.lanes = (ctypes.c_uint16).from_address(tensor + 22).value
        self.shape = self._axes(tensor + 24, ndim)
        self.strides = self._axes(tensor + 32, ndim)
        self.pointer += (ctypes.c_uint64).from_address(tensor + 40).value

    def _axes(self, where: int, ndim: int) -> tuple[int, ...]:
        address = (ctypes.c_void_p).from_address(where).value
        return tuple((ctypes.c_int64 * ndim).from_address(address)) if address else ()

    def close(self) -> None:
        """Call the deleter."""
        function = (ctypes.c_void_p).from_address(self._address + self._deleter).value
        ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(function)(self._address)
