"""Findings about CUDA on this machine: driver, devices, compiler, cuBLAS, and every kernel compiled once."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.compute.cuda.compiler import Compiler, Target, choose_target, source_directory
from pagedkv.compute.cuda.driver import Probe, probe
from pagedkv.compute.cuda.kernels import all_variants
from pagedkv.compute.cuda.select import load_cublas
from pagedkv.config import KvShape
from pagedkv.dtypes import DType
from pagedkv.errors import DeviceError


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    subject: str
    ok: bool
    text: str


def examine_cuda() -> list[Finding]:
    """Look at everything the CUDA backend needs; raises nothing."""
    found = probe()
    findings = [_examine_driver(found)]
    try:
        compiler = Compiler()
        text = f"{'.'.join(map(str, compiler.version))}, sources in {source_directory()}"
        findings += [Finding("nvrtc", True, text), _compile_all(compiler, found)]
    except (ImportError, DeviceError) as error:
        findings.append(Finding("nvrtc", False, str(error)))
    has_cublas = load_cublas() is not None
    findings.append(Finding("cublas", has_cublas, "found" if has_cublas else "not found: pip install pagedkv[cuda]"))
    return findings


def _examine_driver(found: Probe) -> Finding:
    if not found.devices:
        return Finding("cuda driver", False, found.reason)
    names = ", ".join(f"{d.name} (sm_{d.capability[0]}{d.capability[1]}, {d.num_sms} SMs)" for d in found.devices)
    return Finding("cuda driver", True, f"{found.driver_version // 1000}.{found.driver_version % 1000 // 10}: {names}")


def _compile_all(compiler: Compiler, found: Probe) -> Finding:
    """Compile every kernel for the device that is there, or for sm_90."""
    capability = found.devices[0].capability if found.devices else (9, 0)
    target, variants = choose_target(capability, compiler.supported_archs()), 0
    for dtype in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16):
        for variant in all_variants(KvShape(1, 8, 1, 128, dtype)):
            compiler.compile(variant, Target(target.arch, target.is_ptx))
            variants += 1
    return Finding("cuda kernels", True, f"{variants} variants compile for {target.option}")
