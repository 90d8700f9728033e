from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.layout import KvLayout


@pytest.fixture
def make_backend() -> Iterator[Callable[..., CpuBackend]]:
    """Build backends that are closed after the test."""
    backends: list[CpuBackend] = []

    def make(layout: KvLayout, **options: object) -> CpuBackend:
        backends.append(CpuBackend(layout, **options))
        return backends[-1]

    yield make
    for backend in backends:
        backend.close()
