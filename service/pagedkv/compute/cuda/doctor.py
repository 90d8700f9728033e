"""Findings about CUDA on this machine: driver, devices, compiler, cuBLAS; every kernel compiled, a block moved."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np

from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.cuda.compiler import Compiler, OnCompile, choose_target, source_directory
from pagedkv.compute.cuda.driver import Probe, probe, require_driver
from pagedkv.compute.cuda.kernels import STORAGE_CODES, all_variants
from pagedkv.compute.cuda.select import load_cublas
from pagedkv.compute.layout import KvLayout
from pagedkv.config import KvShape
from pagedkv.dtypes import DType
from pagedkv.errors import DeviceError


class Verdict(StrEnum):
    """What a finding means: all is well, something optional is not there, or something is wrong."""

    OK = "ok"
    MISSING = "--"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    subject: str
    verdict: Verdict
    text: str


def examine_cuda(on_compile: OnCompile = lambda done, total, name: None, **stand_ins: Any) -> list[Finding]:
    """Look at everything the CUDA backend needs; raises nothing. What a device there is needs and lacks has failed.

    `stand_ins` are CudaBackend's `driver_module`, `cublas` and `emit_ptx`.
    """
    found = probe(stand_ins.get("driver_module"))
    lack = Verdict.FAILED if found.devices else Verdict.MISSING
    findings = [_examine_driver(found)]
    try:
        compiler = Compiler()
    except ImportError:
        missing = "not found, and kernels for a GPU need it: install pagedkv[cuda]"
        return [*findings, Finding("nvrtc", lack, missing), _examine_cublas(lack, **stand_ins)]
    except DeviceError as error:
        return [*findings, Finding("nvrtc", lack, error.message), _examine_cublas(lack, **stand_ins)]
    findings += [_examine_compiler(compiler, found), _examine_sources()]
    findings += [_compile_all(compiler, found, on_compile), _examine_cublas(lack, **stand_ins)]
    return findings + ([_examine_device(**stand_ins)] if found.devices else [])


def _examine_driver(found: Probe) -> Finding:
    if not found.devices:
        return Finding("cuda driver", Verdict.MISSING, found.reason)
    names = ", ".join(
        f"{d.name} (sm_{d.capability[0]}{d.capability[1]}, {d.num_sms} SMs, {d.memory_bytes / 2**30:.0f} GiB)"
        for d in found.devices
    )
    version = f"{found.driver_version // 1000}.{found.driver_version % 1000 // 10}"
    return Finding("cuda driver", Verdict.OK, f"CUDA {version}: {names}")


def _examine_compiler(compiler: Compiler, found: Probe) -> Finding:
    text = ".".join(map(str, compiler.version))
    if found.devices:
        try:
            target = choose_target(found.devices[0].capability, compiler.supported_archs())
            require_driver(found.driver_version, compiler.version, target.is_ptx)
        except DeviceError as error:
            return Finding("nvrtc", Verdict.FAILED, f"{text}: {error.message}")
    return Finding("nvrtc", Verdict.OK, text)


def _examine_sources() -> Finding:
    try:
        directory = source_directory()
    except DeviceError as error:
        return Finding("cuda sources", Verdict.FAILED, error.message)
    kernels, headers = (len(list(directory.glob(f"*.{ending}"))) for ending in ("cu", "cuh"))
    return Finding(
        "cuda sources", Verdict.OK, f"{kernels} kernels, {headers} headers in {directory}; no CUDA header is needed"
    )


def _examine_cublas(lack: Verdict, **stand_ins: Any) -> Finding:
    if stand_ins.get("cublas") or load_cublas() is not None:
        return Finding("cublas", Verdict.OK, "found")
    return Finding("cublas", lack, "not found, and a model needs it: install pagedkv[cuda]")


def _compile_all(compiler: Compiler, found: Probe, on_compile: OnCompile) -> Finding:
    """Compile every kernel for the device that is there, or for sm_90, in every storage type at head dim 128."""
    started = time.perf_counter()
    try:
        target = choose_target(found.devices[0].capability if found.devices else (9, 0), compiler.supported_archs())
    except DeviceError as error:
        return Finding("cuda kernels", Verdict.FAILED, error.message)
    variants = list(
        dict.fromkeys(v for dtype in STORAGE_CODES for v in all_variants(KvShape(1, 8, 1, 128, DType(dtype))))
    )
    failed = compiler.compile_all(variants, target, on_compile)
    wrong = [f"{label}: {error.message}" for label, error in failed.items()]
    if wrong:
        text = f"{len(wrong)} of {len(variants)} variants do not compile for {target.option}:"
        return Finding("cuda kernels", Verdict.FAILED, "\n".join([text, *wrong]))
    seconds, fresh = time.perf_counter() - started, compiler.num_compiled
    source = f"{fresh} compiled now, {len(variants) - fresh} from the cache"
    return Finding(
        "cuda kernels", Verdict.OK, f"{len(variants)} variants for {target.option} in {seconds:.1f} s ({source})"
    )


def _examine_device(**stand_ins: Any) -> Finding:
    """Write a block on the device, copy it, read both back."""
    rows, dtypes = np.ones((16, 2, 64), np.float32), (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
    try:
        for dtype in dtypes:
            backend = CudaBackend(KvLayout(KvShape(1, 2, 2, 64, dtype), 2, 16), **stand_ins)
            try:
                first, second = backend.submit(partial(_copy_one_block, backend, rows)).result()
            finally:
                backend.close()
            if not first.any() or not np.array_equal(first, second):
                return Finding("cuda device", Verdict.FAILED, f"a copied {dtype} block differs from its source")
    except DeviceError as error:
        return Finding("cuda device", Verdict.FAILED, error.message)
    return Finding("cuda device", Verdict.OK, f"a block written, copied, read back in {', '.join(dtypes)}")


def _copy_one_block(backend: CudaBackend, rows: Any) -> tuple[Any, Any]:
    keys = backend.from_host(rows)
    backend.write_kv(0, keys, keys, np.arange(16))
    backend.copy_blocks([(0, 1)])
    return backend.read_block(0), backend.read_block(1)
