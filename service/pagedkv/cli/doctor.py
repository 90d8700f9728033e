"""`pagedkv doctor`: what this machine offers, and every kernel compiled once."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version

import numpy as np
from rich.markup import escape
from rich.table import Table

from pagedkv.cli.console import make_console
from pagedkv.cli.progress import CompileProgress
from pagedkv.cli.threads import in_thread
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.cuda.compiler import OnCompile
from pagedkv.compute.cuda.doctor import Finding, Verdict, examine_cuda
from pagedkv.compute.cuda.select import check_cuda
from pagedkv.compute.layout import KvLayout
from pagedkv.config import KvShape
from pagedkv.dtypes import DType
from pagedkv.errors import DeviceError

_PACKAGES = ("numpy", "numba", "llvmlite", "grpcio", "protobuf", "cuda-bindings", "nvidia-cuda-nvrtc", "nvmath-python")
_COLOURS = {Verdict.OK: "green", Verdict.MISSING: "yellow", Verdict.FAILED: "bold red"}
_DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)


def run_doctor() -> int:
    """Print the report; return 1 if the CPU backend or anything that a GPU of this machine needs has failed."""
    console = make_console()
    with CompileProgress(console) as progress:
        findings = asyncio.run(in_thread(lambda: _examine(progress.update)))  # signals are heard meanwhile
    console.print("[bold]pagedkv doctor[/]")
    console.print(_to_table(findings))
    console.print(f"[bold]pagedkv serve[/] takes the {_choice()}")
    return int(any(finding.verdict is Verdict.FAILED for finding in findings))


def _examine(on_compile: OnCompile) -> list[Finding]:
    return [*_machine(), _examine_cpu(on_compile), *examine_cuda(on_compile)]


def _to_table(findings: list[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark = f"[{_COLOURS[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(mark, finding.subject, escape(finding.text))
    return table


def _choice() -> str:
    """Say which backend "auto" means for a model here."""
    try:
        check_cuda(needs_cublas=True)
    except DeviceError:
        return "CPU"
    return "GPU"


def _machine() -> list[Finding]:
    machine = f"{platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} cores for this process"
    packages = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    return [
        Finding("machine", Verdict.OK, machine),
        Finding("python", Verdict.OK, platform.python_version()),
        Finding("packages", Verdict.OK, packages),
    ]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _examine_cpu(on_compile: OnCompile) -> Finding:
    """Compile the CPU kernels for each storage type; write, copy and read one block."""
    started = time.perf_counter()
    for dtype in _DTYPES:
        layout = KvLayout(KvShape(1, 8, 2, 64, dtype), num_blocks=2, block_size=16)
        backend = CpuBackend(layout, on_compile=on_compile)
        try:
            backend.warm_up()
            same = _copy_one_block(backend)
        finally:
            backend.close()
        if not same:
            return Finding("cpu backend", Verdict.FAILED, f"a copied {dtype} block differs from its source")
    text = (
        f"{backend.isa}, {backend.num_threads} threads; kernels ready in {time.perf_counter() - started:.1f} s; "
        f"a block written, copied, read back in {', '.join(_DTYPES)}"
    )
    return Finding("cpu backend", Verdict.OK, text)


def _copy_one_block(backend: CpuBackend) -> bool:
    rows = np.ones((16, 2, 64), dtype=np.float32)
    backend.submit(lambda: backend.write_kv(0, rows, rows, np.arange(16))).result()
    backend.submit(lambda: backend.copy_blocks([(0, 1)])).result()
    return np.array_equal(backend.read_block(0), backend.read_block(1))
