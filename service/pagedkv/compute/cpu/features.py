"""Which instructions the kernels are built for: AVX-512, AVX2 or whatever the compiler's baseline has."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Final

import llvmlite.binding as llvm
import numba

from pagedkv.config import require

ISA_VARIABLE: Final = "PAGEDKV_CPU_ISA"


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set as the kernels see it: `width` float32 lanes a vector, `needs` the host's features."""

    name: str
    width: int
    needs: tuple[str, ...]
    llvm_name: str  # the processor that code is generated for when the whole process is held to this set


ISAS: Final = {
    isa.name: isa
    for isa in (
        Isa("avx512", 16, ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c"), "skylake-avx512"),
        Isa("avx2", 8, ("avx2", "fma", "f16c"), "haswell"),
        Isa("portable", 4, (), "x86-64"),
    )
}
_BYTE_DOTS: Final = ("avx512vnni", "avx512vbmi")


def usable_isas() -> list[Isa]:
    """Return the sets whose instructions this machine has and, if the process is held to one, none above it."""
    host, held = llvm.get_host_cpu_features(), ISAS.get(os.environ.get(ISA_VARIABLE, ""))
    has_all = [isa for isa in ISAS.values() if all(host.get(feature, False) for feature in isa.needs)]
    return [isa for isa in has_all if held is None or isa.width <= held.width]


def choose_isa(name: str | None = None) -> Isa:
    """Return the set named by the argument, else by PAGEDKV_CPU_ISA, else the best this machine has.

    Raises:
        InvalidArgument: no such set, this machine lacks its instructions, or the process is held to a lesser one.
    """
    usable = usable_isas()
    wanted = name or os.environ.get(ISA_VARIABLE)
    if wanted is None:
        return usable[0]
    names = tuple(isa.name for isa in usable)
    require(wanted in names, "isa", f"must be one of {', '.join(names)} on this machine", wanted, names)
    return ISAS[wanted]


def has_byte_dots(isa: Isa) -> bool:
    """Whether kernels of this set may use AVX-512's products of bytes, which not every machine of the set has."""
    host, is_held = llvm.get_host_cpu_features(), os.environ.get(ISA_VARIABLE) in ISAS
    return isa.name == "avx512" and not is_held and all(host.get(name, False) for name in _BYTE_DOTS)


def hold_code_generation() -> None:
    """Keep all code of this process to the set that PAGEDKV_CPU_ISA names; call before numba compiles anything."""
    wanted = os.environ.get(ISA_VARIABLE)
    if wanted not in ISAS or platform.machine() not in ("x86_64", "AMD64"):
        return
    numba.config.CPU_NAME = ISAS[wanted].llvm_name
    numba.config.CPU_FEATURES = ",".join(f"+{feature}" for feature in ISAS[wanted].needs)
