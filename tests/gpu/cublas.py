"""cuBLAS for the GPU check: nvmath's bindings where they are, else the same few names over ctypes."""

from __future__ import annotations

import ctypes
from typing import Any

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_OPERAND = (_POINTER, _INT, _INT)  # address, type, leading dimension


class CtypesCublas:
    """Stands in for the module `nvmath.bindings.cublas`, over the loaded library."""

    def __init__(self, library: Any) -> None:
        self._library = library
        for name, kinds in {
            "cublasCreate_v2": (_POINTER,),
            "cublasDestroy_v2": (_POINTER,),
            "cublasSetStream_v2": (_POINTER, _POINTER),
            "cublasSetWorkspace_v2": (_POINTER, _POINTER, ctypes.c_size_t),
            "cublasGemmEx": (_POINTER, *[_INT] * 5, _POINTER, *_OPERAND, *_OPERAND, _POINTER, *_OPERAND, _INT, _INT),
        }.items():
            getattr(library, name).argtypes = kinds

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._library, name)(*args)
        if status != 0:
            raise RuntimeError(f"{name}: status {status}")

    def create(self) -> int:
        """Return a handle in the current context."""
        handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(handle))
        return int(handle.value or 0)

    def destroy(self, handle: int) -> None:
        """Destroy a handle."""
        self._call("cublasDestroy_v2", handle)

    def set_stream(self, handle: int, stream: int) -> None:
        """Have the handle's products run on the stream."""
        self._call("cublasSetStream_v2", handle, stream)

    def set_workspace(self, handle: int, workspace: int, num_bytes: int) -> None:
        """Give the handle's products device memory to work in."""
        self._call("cublasSetWorkspace_v2", handle, workspace, num_bytes)

    def gemm_ex(self, handle: int, *args: int) -> None:
        """See cublasGemmEx; scalars by host address, in the library's order."""
        self._call("cublasGemmEx", handle, *args)


def load_cublas() -> tuple[Any, str]:
    """Return bindings and their name, or None and why there are none."""
    from pagedkv.compute.cuda import select

    if (bindings := select.load_cublas()) is not None:
        return bindings, "nvmath"
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("cublas").abs_path
        return CtypesCublas(ctypes.CDLL(str(path))), f"ctypes over {path}"
    except Exception as error:  # whatever the search for a library can meet
        return None, " ".join(str(error).split())
