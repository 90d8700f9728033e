"""Registers, shared memory and theoretical occupancy of kernel variants, from ptxas; needs no GPU.

The table is kept in tests/bench/kernels.json, so that a change of a kernel shows in the diff.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pagedkv.compute.cuda.compiler import Compiler, Target
from pagedkv.compute.cuda.kernels import Variant, all_variants
from pagedkv.config import KvShape
from pagedkv.dtypes import DType
from tests.bench.report import print_table

RESULT = Path(__file__).parent / "kernels.json"
# arch: shared bytes and threads of an SM; each CTA costs 1 KiB of shared memory more; registers come in 256 a warp
ARCHES = {80: (164 << 10, 2048), 90: (228 << 10, 2048), 100: (228 << 10, 2048), 120: (100 << 10, 1536)}
REGISTERS = 65536
DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT8_E4M3, DType.INT8)


def occupancy(arch: int, num_threads: int, registers: int, shared_bytes: int) -> float:
    """Return resident threads over the most an SM holds."""
    shared, threads = ARCHES[arch]
    warps = -(-num_threads // 32)
    by_registers = REGISTERS // max(1, -(-registers * 32 // 256) * 256 * warps)
    ctas = min(threads // num_threads, by_registers, shared // (shared_bytes + 1024), 32)
    return ctas * num_threads / threads


def variants(head_dims: list[int]) -> list[Variant]:
    chosen = {v for dim in head_dims for dtype in DTYPES for v in all_variants(KvShape(1, 8, 1, dim, dtype))}
    return sorted(chosen, key=lambda variant: variant.label)


def measure(compiler: Compiler, variant: Variant, arch: int) -> dict[str, Any]:
    found = compiler.compile(variant, Target(arch)).resources
    shared = variant.shared_bytes + found.shared_bytes
    return {
        "registers": found.registers,
        "spilled_bytes": found.spilled_bytes,
        "stack_bytes": found.stack_bytes,
        "shared_bytes": shared,
        "occupancy": round(occupancy(arch, variant.num_threads, found.registers, shared), 3),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./run bench kernels", description=__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--arches", type=int, nargs="+", default=list(ARCHES))
    options = parser.parse_args(argv)
    compiler = Compiler()
    table = {
        variant.label: {f"sm_{arch}": measure(compiler, variant, arch) for arch in options.arches}
        for variant in variants(options.head_dims)
    }
    RESULT.write_text(json.dumps({"nvrtc": list(compiler.version), "kernels": table}, indent=1) + "\n")
    columns = ["variant", *(f"sm_{arch}: regs / KiB / occupancy" for arch in options.arches)]
    rows = [[label, *(_cell(figures) for figures in by_arch.values())] for label, by_arch in table.items()]
    print_table("CUDA kernels", columns, rows)
    bad = [
        label
        for label, by_arch in table.items()
        if any(f["spilled_bytes"] + f["stack_bytes"] for f in by_arch.values())
    ]
    print(f"{len(table)} variants, {len(bad)} with spills or a stack {bad}")
    return 1 if bad else 0


def _cell(figures: dict[str, Any]) -> str:
    return f"{figures['registers']} / {figures['shared_bytes'] / 1024:.0f} / {figures['occupancy']:.2f}"
