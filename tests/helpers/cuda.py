"""CUDA backends on the virtual GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.layout import KvLayout
from virtual_gpu import VirtualDriver
from virtual_gpu.cublas import VirtualCublas
from virtual_gpu.profile import Profile

SMALL = Profile(memory_bytes=64 << 20, host_bytes=64 << 20)


def make_virtual_backend(
    layout: KvLayout, *, schedule: str | int = "lazy", profile: Profile = SMALL, **options: Any
) -> tuple[CudaBackend, VirtualDriver]:
    driver = VirtualDriver(profile, schedule=schedule)
    return CudaBackend(layout, driver_module=driver, cublas=VirtualCublas(driver), emit_ptx=True, **options), driver


@contextmanager
def virtual_backends(**options: Any) -> Iterator[Callable[[KvLayout], CudaBackend]]:
    """Yield a factory of backends; at the end none of their devices may have seen a fault or a leak."""
    drivers: list[VirtualDriver] = []

    def make(layout: KvLayout) -> CudaBackend:
        backend, driver = make_virtual_backend(layout, **options)
        drivers.append(driver)
        return backend

    yield make
    for driver in drivers:
        driver.assert_clean()
