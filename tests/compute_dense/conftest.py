from __future__ import annotations

from collections.abc import Callable, Iterator

import llvmlite.binding as llvm
import pytest

from pagedkv.compute.cpu.dense import CpuDenseOps
from pagedkv.compute.cpu.features import ISAS, choose_isa
from pagedkv.compute.cpu.threads import WorkerPool

_HOST = llvm.get_host_cpu_features()
USABLE_ISAS = [isa.name for isa in ISAS.values() if all(_HOST.get(feature, False) for feature in isa.needs)]

MakeOps = Callable[..., CpuDenseOps]


@pytest.fixture(scope="module")
def make_ops() -> Iterator[MakeOps]:
    """Build dense operations for an instruction set and a number of threads, once each."""
    pools: dict[int, WorkerPool] = {}
    made: dict[tuple[str | None, int, str], CpuDenseOps] = {}

    def make(isa: str | None = None, num_threads: int = 2, activations: str = "float32") -> CpuDenseOps:
        if num_threads not in pools:
            pools[num_threads] = WorkerPool(num_threads)
        key = (isa, num_threads, activations)
        if key not in made:
            made[key] = CpuDenseOps(choose_isa(isa), pools[num_threads], activations=activations)
        return made[key]

    yield make
    for pool in pools.values():
        pool.close()


@pytest.fixture(params=USABLE_ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set that this machine can run."""
    return request.param
