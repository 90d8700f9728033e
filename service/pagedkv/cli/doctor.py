"""`pagedkv doctor`: what this machine offers, and every kernel compiled once."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import numpy as np
from rich.console import Console
from rich.table import Table

from pagedkv.cli.progress import CompileProgress
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.cuda.doctor import examine_cuda
from pagedkv.compute.layout import KvLayout
from pagedkv.config import KvShape
from pagedkv.dtypes import DType

_PACKAGES = ("numpy", "numba", "llvmlite", "grpcio", "protobuf", "cuda-bindings", "nvidia-cuda-nvrtc", "nvmath-python")


def run_doctor() -> int:
    """Print the report; return 0 if the backend works."""
    console = Console()
    table = Table(title="pagedkv doctor", show_header=False, title_justify="left")
    for name, value in _machine():
        table.add_row(name, value)
    console.print(table)
    problem = _examine_cpu(console)
    if problem:
        console.print(f"[red]failed[/] cpu backend: {problem}", highlight=False)
        return 1
    console.print("[green]ok[/] cpu backend: kernels compiled; a block written, copied, read back in each storage type")
    for finding in examine_cuda():
        mark = "[green]ok[/]" if finding.ok else "[yellow]--[/]"
        console.print(f"{mark} {finding.subject}: {finding.text}", highlight=False)
    return 0


def _machine() -> list[tuple[str, str]]:
    rows = [
        ("machine", f"{platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} cores for this process"),
        ("python", platform.python_version()),
    ]
    return rows + [(name, _version(name)) for name in _PACKAGES]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _examine_cpu(console: Console) -> str:
    """Compile the CPU kernels for each storage type; write, copy and read one block. Return what is wrong."""
    for dtype in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16):
        with CompileProgress(console) as progress:
            layout = KvLayout(KvShape(1, 8, 2, 64, dtype), num_blocks=2, block_size=16)
            backend = CpuBackend(layout, on_compile=progress.update)
            backend.warm_up()
        same = _copy_one_block(backend)
        backend.close()
        if not same:
            return f"a copied {dtype} block differs from its source"
    return ""


def _copy_one_block(backend: CpuBackend) -> bool:
    rows = np.ones((16, 2, 64), dtype=np.float32)
    backend.submit(lambda: backend.write_kv(0, rows, rows, np.arange(16))).result()
    backend.submit(lambda: backend.copy_blocks([(0, 1)])).result()
    return np.array_equal(backend.read_block(0), backend.read_block(1))
