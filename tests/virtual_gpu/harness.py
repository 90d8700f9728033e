"""Small kernels for tests: compile CUDA C, or wrap one PTX instruction, and run it on arrays."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from cuda.bindings import nvrtc
from cuda.pathfinder import find_nvidia_header_directory

from virtual_gpu import GpuFault, VirtualDriver
from virtual_gpu.alu import DTYPES


@functools.cache
def compile_cuda(source: str, arch: str = "compute_80") -> bytes:
    """CUDA C to PTX."""
    code, program = nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, [], [])
    assert int(code) == 0
    options = [
        f"--gpu-architecture={arch}".encode(),
        b"-lineinfo",
        f"-I{find_nvidia_header_directory('cudart')}".encode(),
    ]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert int(code) == 0, log.decode()
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = bytearray(size)
    nvrtc.nvrtcGetPTX(program, text)
    return bytes(text)


def ok(result: tuple[Any, ...]) -> Any:
    """Unwrap a driver result that must have succeeded."""
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) == 2 else result[1:]


class Gpu:
    """A VirtualDriver with shorthand for tests."""

    def __init__(self, **options: Any) -> None:
        self.driver = VirtualDriver(**options)
        ok(self.driver.cuInit(0))
        ok(self.driver.cuCtxSetCurrent(ok(self.driver.cuDevicePrimaryCtxRetain(0))))

    def put(self, array: np.ndarray) -> int:
        pointer = ok(self.driver.cuMemAlloc(array.nbytes))
        ok(self.driver.cuMemcpyHtoD(pointer, np.ascontiguousarray(array), array.nbytes))
        ok(self.driver.cuStreamSynchronize(0))  # other streams do not wait for that copy
        return int(pointer)

    def empty(self, nbytes: int) -> int:
        return int(ok(self.driver.cuMemAlloc(nbytes)))

    def get(self, pointer: int, shape: Any, dtype: Any) -> np.ndarray:
        array = np.empty(shape, dtype)
        ok(self.driver.cuMemcpyDtoH(array, pointer, array.nbytes))
        return array

    def function(self, text: bytes | str, name: str = "k") -> Any:
        image = text.encode() if isinstance(text, str) else text
        result = self.driver.cuModuleLoadData(image)
        if int(result[0]):
            raise self.driver.faults[-1]
        return ok(self.driver.cuModuleGetFunction(result[1], name.encode()))

    def launch(self, function: Any, grid: int, block: int, *args: Any, shared: int = 0, stream: Any = 0) -> Any:
        """Queue a launch; int arguments are pointers (8 bytes), NumPy scalars keep their type. Returns the code."""
        kinds = tuple(ctypes.c_uint64 if isinstance(a, int) else np.ctypeslib.as_ctypes_type(a.dtype) for a in args)
        values = tuple(a if isinstance(a, int) else a.item() for a in args)
        return self.driver.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, shared, stream, (values, kinds), 0)[0]

    def run(self, function: Any, grid: int, block: int, *args: Any, shared: int = 0) -> None:
        """Launch and wait. Raises the fault where there is one."""
        code = self.launch(function, grid, block, *args, shared=shared)
        assert int(code) == 0, self.driver.cuGetErrorString(code)
        self.driver.cuStreamSynchronize(0)
        self.driver.assert_clean()

    def fault(self, function: Any, grid: int, block: int, *args: Any, shared: int = 0) -> GpuFault:
        """Launch and return the fault that must follow."""
        assert int(self.launch(function, grid, block, *args, shared=shared)) == 0
        assert int(self.driver.cuStreamSynchronize(0)[0]) != 0
        fault = self.driver.faults[0]
        assert isinstance(fault, GpuFault)
        return fault


_LOAD = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}


def evaluate(instruction: str, result: str, **inputs: tuple[str, Any]) -> np.ndarray:
    """Run one instruction, a thread per element: `evaluate("add.f32 %d, %a, %b;", "f32", a=("f32", [1]), ...)`.

    Types name registers; values are given in that type (or as raw bits for types NumPy lacks).
    """
    arrays = {name: np.asarray(values).astype(DTYPES[kind]) for name, (kind, values) in inputs.items()}
    count = max(a.size for a in arrays.values())
    dtype = np.dtype(DTYPES[result])
    lines = [".version 8.0", ".target sm_90", ".address_size 64", ".visible .entry k("]
    lines.append(",".join([*(f".param .u64 p{name}" for name in inputs), ".param .u64 pd"]) + ") {")
    lines.append(".reg .u32 %i; .reg .u64 %q; .reg .b32 %t; .reg .b32 %u; .reg .pred %p; .reg .pred %p2;")
    lines.append("mov.u32 %i, %tid.x;")
    for name, (kind, _) in inputs.items():
        lines += _transfer("ld", name, kind)
    lines.append(f".reg .{_register(result)} %d;")
    lines += [instruction, *_transfer("st", "d", result), "ret; }"]
    gpu = Gpu()
    function = gpu.function("\n".join(lines))
    pointers = [gpu.put(np.broadcast_to(a, count)) for a in arrays.values()]
    out = gpu.empty(count * dtype.itemsize)
    gpu.run(function, 1, count, *pointers, out)
    return gpu.get(out, count, dtype)


def _register(kind: str) -> str:
    width = np.dtype(DTYPES[kind]).itemsize
    if "x2" in kind:
        width = 4
    return f"b{max(16, 8 * width)}"


def _transfer(base: str, name: str, kind: str) -> list[str]:
    width = 4 if "x2" in kind else np.dtype(DTYPES[kind]).itemsize
    head = f".reg .{_register(kind)} %{name}; " if base == "ld" else ""
    address = f"ld.param.u64 %q, [p{name}]; mad.wide.u32 %q, %i, {width}, %q; "
    value = f"%{name}, [%q];" if base == "ld" else f"[%q], %{name};"
    return [f"{head}{address}{base}.global.{_LOAD[width]} {value}"]
