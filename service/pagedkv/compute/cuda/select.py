"""Open the CUDA backend where it can run, with a pool sized by the device's own memory, or say why it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.cuda.compiler import Compiler, choose_target
from pagedkv.compute.cuda.driver import Context, Driver, probe, require_driver
from pagedkv.compute.layout import KvLayout
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


def open_cuda_backend(
    size: Callable[[int], KvLayout], *, driver_module: Any = None, cublas: Any = None, **options: Any
) -> CudaBackend:
    """Return a backend on the first device; `size` is told how many bytes of device memory are free.

    `driver_module`, `cublas` and `options` are CudaBackend's. Raises as it does, and whatever `size` raises; then
    nothing on the device is left taken.
    """
    context = Context(Driver(driver_module))
    try:
        layout = size(int(context.driver.call("cuMemGetInfo")[0]))
        return CudaBackend(layout, driver_module=driver_module, cublas=cublas or load_cublas(), **options)
    finally:
        context.release()  # the backend holds the context itself


def load_cublas() -> Any:
    """Return `nvmath.bindings.cublas`, or None where it or its library is missing."""
    try:
        from nvmath.bindings import cublas

        cublas.get_property(0)  # loads the library
    except (ImportError, RuntimeError):
        return None
    return cublas
