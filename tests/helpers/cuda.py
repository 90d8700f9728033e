"""CUDA backends on the virtual GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pagedkv.cli.assemble import BackendOpener
from pagedkv.cli.backends import open_cuda
from pagedkv.compute.cuda.array import Allocation, ScratchMemory
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
    backend = CudaBackend(layout, driver_module=driver, cublas=VirtualCublas(driver), emit_ptx=True, **options)
    poison_given_back(backend, driver)
    return backend, driver


def poison_given_back(backend: CudaBackend, driver: VirtualDriver) -> None:
    """Let every array that scratch memory hands out hold bytes that nobody wrote, whatever lay there before."""

    class Poisoned(ScratchMemory):
        def allocate(self, nbytes: int) -> Allocation:
            owner = super().allocate(nbytes)
            driver.poison(owner.pointer, backend.device.streams.compute)
            return owner

    for memory in (backend.device.scratch, backend.graphs._memory):
        memory.__class__ = Poisoned


@contextmanager
def virtual_backends(**options: Any) -> Iterator[Callable[..., CudaBackend]]:
    """Yield a factory of backends; at the end none of their devices may have seen a fault or a leak."""
    drivers: list[VirtualDriver] = []

    def make(layout: KvLayout, **more: Any) -> CudaBackend:
        backend, driver = make_virtual_backend(layout, **options, **more)
        drivers.append(driver)
        return backend

    yield make
    for driver in drivers:
        driver.assert_clean()


def virtual_opener(driver: VirtualDriver, **options: Any) -> BackendOpener:
    """Return what opens `--backend cuda` of `build_service` on a virtual device."""
    stand_ins = {"driver_module": driver, "cublas": VirtualCublas(driver), "emit_ptx": True, **options}
    return functools.partial(open_cuda, **stand_ins)
