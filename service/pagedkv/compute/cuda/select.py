"""Open the CUDA backend where it can run, or say why it cannot."""

from __future__ import annotations

from typing import Any

from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.cuda.compiler import Compiler, choose_target
from pagedkv.compute.cuda.driver import probe, require_driver
from pagedkv.compute.layout import KvLayout
from pagedkv.config import KvShape
from pagedkv.errors import DeviceError


def check_cuda(*, needs_cublas: bool, driver_module: Any = None, cublas: Any = None) -> None:
    """Raise DeviceError if CUDA cannot run here: no driver, device, compiler or cuBLAS, or one too old."""
    found = probe(driver_module)
    if not found.devices:
        raise DeviceError(found.reason)
    try:
        compiler = Compiler()
    except ImportError as error:
        raise DeviceError("NVRTC is not there: install pagedkv[cuda]") from error
    target = choose_target(found.devices[0].capability, compiler.supported_archs())
    require_driver(found.driver_version, compiler.version, target.is_ptx)
    if needs_cublas and cublas is None and load_cublas() is None:
        raise DeviceError("a model needs cuBLAS, which is not there: install pagedkv[cuda]")


def open_cuda_backend(shape: KvShape, block_size: int, *, cublas: Any = None, **options: Any) -> CudaBackend:
    """Return a backend on the first device whose pools are still to be opened, by `CudaBackend.open_pools`.

    `cublas` and `options` are CudaBackend's. Raises as it does.
    """
    return CudaBackend(KvLayout(shape, 1, block_size), cublas=cublas or load_cublas(), has_pool=False, **options)


def load_cublas() -> Any:
    """Return `nvmath.bindings.cublas`, or None where it or its library is missing."""
    try:
        from nvmath.bindings import cublas

        cublas.get_property(0)  # loads the library
    except (ImportError, RuntimeError):
        return None
    return cublas
