"""Open the CUDA backend where there is a GPU, or say why not."""

from __future__ import annotations

from typing import Any

from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.cuda.driver import probe
from pagedkv.compute.layout import KvLayout
from pagedkv.errors import DeviceError


def open_cuda_backend(layout: KvLayout) -> CudaBackend:
    """Return a backend on the first device. Raises DeviceError saying why there is none."""
    found = probe()
    if not found.devices:
        raise DeviceError(found.reason)
    return CudaBackend(layout, cublas=load_cublas())


def load_cublas() -> Any:
    """Return `nvmath.bindings.cublas`, or None where it or its library is missing."""
    try:
        from nvmath.bindings import cublas

        cublas.get_property(0)  # loads the library
    except (ImportError, RuntimeError):
        return None
    return cublas
