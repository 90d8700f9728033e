"""The virtual GPU behind the C functions of a stand-in libcuda.so.1, so that the real bindings are between."""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from virtual_gpu.driver import real
from virtual_gpu.virtual_driver import VirtualDriver

# A letter for each parameter: P pointer or handle, z size_t, u and i int, b byte, s string; upper-case results behind
# a pointer: I int, Q 8 bytes, F float, N a name's buffer, S a string.
PROTOTYPES = {
    "cuInit": "u", "cuDriverGetVersion": "I", "cuDeviceGetCount": "I", "cuDeviceGet": "Ii", "cuDeviceGetName": "Nii",
    "cuDeviceTotalMem": "Qi", "cuDeviceGetAttribute": "Iii", "cuDevicePrimaryCtxRetain": "Qi",
    "cuDevicePrimaryCtxRelease": "i", "cuCtxSetCurrent": "P", "cuCtxPushCurrent": "P", "cuCtxPopCurrent": "Q",
    "cuGetErrorString": "iS", "cuStreamCreate": "Qu", "cuStreamDestroy": "P", "cuStreamWaitEvent": "PPu",
    "cuStreamBeginCapture": "Pi", "cuStreamEndCapture": "PQ", "cuEventCreate": "Qu", "cuEventDestroy": "P",
    "cuEventRecord": "PP", "cuEventSynchronize": "P", "cuEventElapsedTime": "FPP", "cuMemAlloc": "Qz", "cuMemFree": "P",
    "cuMemHostAlloc": "Qzu", "cuMemFreeHost": "P", "cuMemGetInfo": "QQ", "cuMemcpyHtoDAsync": "PPzP",
    "cuMemcpyDtoHAsync": "PPzP", "cuMemcpyDtoDAsync": "PPzP", "cuMemsetD8Async": "PbzP", "cuModuleLoadData": "QP",
    "cuModuleUnload": "P", "cuModuleGetFunction": "QPs", "cuFuncSetAttribute": "Pii",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": "IPiz", "cuLaunchKernel": "PuuuuuuuPPP",
    "cuGraphInstantiateWithFlags": "QPP", "cuGraphLaunch": "PP", "cuGraphExecDestroy": "P", "cuGraphDestroy": "P",
}  # fmt: skip
_KINDS: dict[str, Any] = {
    "P": ctypes.c_uint64, "z": ctypes.c_size_t, "u": ctypes.c_uint, "i": ctypes.c_int, "b": ctypes.c_ubyte,
    "s": ctypes.c_char_p, "I": ctypes.POINTER(ctypes.c_int), "Q": ctypes.POINTER(ctypes.c_uint64),
    "F": ctypes.POINTER(ctypes.c_float), "N": ctypes.POINTER(ctypes.c_char), "S": ctypes.POINTER(ctypes.c_char_p),
}  # fmt: skip
_ENUMS = {"cuDeviceGetAttribute": (0, real.CUdevice_attribute), "cuFuncSetAttribute": (1, real.CUfunction_attribute)}


class Library:
    """Answers the bindings' calls with a virtual driver's; keeps alive what C holds."""

    def __init__(self, path: Path, driver: VirtualDriver) -> None:
        self._driver, self._texts = driver, {}
        self._functions = {name: self._function(name, kinds) for name, kinds in PROTOTYPES.items()}
        self._lookup = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(self._find)
        ctypes.CDLL(str(path)).set_lookup(self._lookup)

    def _find(self, name: bytes) -> int | None:
        found = self._functions.get(name.decode())
        return None if found is None else ctypes.cast(found, ctypes.c_void_p).value

    def _function(self, name: str, kinds: str) -> Callable[..., int]:
        def call(*args: Any) -> int:
            try:
                return self._answer(name, kinds, args)
            except BaseException:
                traceback.print_exc()
                return int(real.CUresult.CUDA_ERROR_UNKNOWN)

        return ctypes.CFUNCTYPE(ctypes.c_int, *(_KINDS[kind] for kind in kinds))(call)

    def _answer(self, name: str, kinds: str, args: tuple[Any, ...]) -> int:
        given = [arg for arg, kind in zip(args, kinds, strict=True) if kind not in "IQFNS"]
        if name in _ENUMS:
            at, enum = _ENUMS[name]
            given[at] = enum(given[at])
        status, *values = getattr(self._driver, name)(*given)
        if int(status) == 0:
            places = [(arg, kind) for arg, kind in zip(args, kinds, strict=True) if kind in "IQFNS"]
            for (place, kind), value in zip(places, values, strict=True):
                self._store(place, kind, value)
        return int(status)

    def _store(self, place: Any, kind: str, value: Any) -> None:
        if kind == "N":
            ctypes.memmove(place, value, len(value))
        elif kind == "S":
            self._texts[value] = ctypes.create_string_buffer(value)
            place[0] = ctypes.cast(self._texts[value], ctypes.c_char_p)
        else:
            place[0] = float(value) if kind == "F" else int(value)
