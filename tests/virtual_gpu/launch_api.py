"""Modules, functions and launches of the virtual driver."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from virtual_gpu import checks
from virtual_gpu.driver import CUresult, DriverError, address_and_size, api, real
from virtual_gpu.faults import UnsupportedPtx
from virtual_gpu.machine import Launch, check_supported
from virtual_gpu.memory import Allocation
from virtual_gpu.memory_api import MemoryApi
from virtual_gpu.program import Kernel
from virtual_gpu.ptx_parser import parse_ptx
from virtual_gpu.queues import Op

_ATTRIBUTE = real.CUfunction_attribute


@dataclass(eq=False)
class Module:
    kernels: dict[str, Kernel] = field(default_factory=dict)
    globals: dict[str, Allocation] = field(default_factory=dict)
    functions: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class Function:
    kernel: Kernel
    max_dynamic_shared: int
    moves_poison: bool = False


def _image_text(image: Any) -> bytes:
    if isinstance(image, bytes | bytearray):
        return bytes(image)
    if isinstance(image, np.ndarray):
        return image.tobytes()
    return ctypes.string_at(int(image))


def read_params(kernel: Kernel, params: Any) -> bytes:
    """Kernel arguments as the bytes of the parameter space: from (values, types), or from pointers to values."""
    data = bytearray(kernel.param_bytes)
    if not kernel.param_sizes:
        return bytes(data)
    if isinstance(params, tuple) and len(params) == 2 and isinstance(params[0], tuple | list):
        values, kinds = params
        if len(values) != len(kernel.param_sizes):
            raise DriverError(
                CUresult.CUDA_ERROR_INVALID_VALUE,
                f"{kernel.name} takes {len(kernel.param_sizes)} arguments, got {len(values)}",
            )
        for (offset, size), value, kind in zip(kernel.param_sizes, values, kinds, strict=True):
            raw = _argument_bytes(value, kind)
            if len(raw) != size:
                raise DriverError(
                    CUresult.CUDA_ERROR_INVALID_VALUE,
                    f"{kernel.name}: the argument at offset {offset} has {size} bytes, got {len(raw)}",
                )
            data[offset : offset + size] = raw
        return bytes(data)
    table = address_and_size(params)[0]
    if not table:
        raise DriverError(CUresult.CUDA_ERROR_INVALID_VALUE, f"{kernel.name}: no arguments")
    pointers = (ctypes.c_void_p * len(kernel.param_sizes)).from_address(table)
    for (offset, size), pointer in zip(kernel.param_sizes, pointers, strict=True):
        data[offset : offset + size] = ctypes.string_at(pointer, size)
    return bytes(data)


def _argument_bytes(value: Any, kind: Any) -> bytes:
    if kind is None:  # the bindings take the object's own buffer or pointer
        if hasattr(value, "getPtr"):
            return int(value).to_bytes(8, "little")
        return bytes(value)
    if isinstance(value, kind):
        return bytes(value)
    return bytes(kind(value if isinstance(value, float) else int(value)))


class LaunchApi(MemoryApi):
    @api(1)
    def cuModuleLoadData(self, image: Any) -> Any:
        self.require_safe("loading a module")
        text = _image_text(image)
        if text.startswith(b"\x7fELF"):
            raise DriverError(CUresult.CUDA_ERROR_INVALID_IMAGE, "the virtual GPU loads PTX, not CUBIN")
        try:
            return real.CUmodule(self.new_handle(self._load(text.rstrip(b"\0").decode("utf-8", "replace"))))
        except UnsupportedPtx as error:
            self.faults.append(error)
            raise DriverError(CUresult.CUDA_ERROR_INVALID_PTX, str(error)) from error

    def cuModuleLoadDataEx(self, image: Any, numOptions: int, options: Any, optionValues: Any) -> Any:
        return self.cuModuleLoadData(image)

    def _load(self, text: str) -> Module:
        parsed = parse_ptx(text)
        module = Module()
        symbols: dict[str, int] = {}
        for variable in parsed.variables.values():
            if variable.space in ("global", "const"):
                allocation = self._allocate(max(1, variable.size), False)
                span = slice(allocation.offset, allocation.offset + allocation.size)
                self.memory.data[span] = np.frombuffer((variable.data or b"").ljust(allocation.size, b"\0"), np.uint8)
                self.memory.shadow[span] = checks.INITIALISED
                module.globals[variable.name] = allocation
                symbols[variable.name] = allocation.address
        for function in parsed.functions.values():
            if function.is_entry:
                kernel = Kernel(parsed, function, symbols)
                check_supported(kernel)
                module.kernels[function.name] = kernel
        return module

    @api()
    def cuModuleUnload(self, hmod: Any) -> None:
        self.require_safe("unloading a module")
        module = self.lookup(hmod, Module)
        for handle in (int(hmod), *module.functions.values()):
            del self.handles[handle]
        for allocation in module.globals.values():
            self.memory.free(allocation.address)

    @api(1)
    def cuModuleGetFunction(self, hmod: Any, name: Any) -> Any:
        module = self.lookup(hmod, Module)
        text = name.decode() if isinstance(name, bytes) else str(name)
        if text not in module.kernels:
            raise DriverError(CUresult.CUDA_ERROR_NOT_FOUND, f"no kernel {text}; there are {sorted(module.kernels)}")
        if text not in module.functions:
            kernel = module.kernels[text]
            limit = max(0, self.profile.shared_per_block - kernel.static_shared)
            moves = any(part in text for part in self.moves_poison)
            module.functions[text] = self.new_handle(Function(kernel, limit, moves))
        return real.CUfunction(module.functions[text])

    @api(2)
    def cuModuleGetGlobal(self, hmod: Any, name: Any) -> Any:
        text = name.decode() if isinstance(name, bytes) else str(name)
        allocation = self.lookup(hmod, Module).globals.get(text)
        if allocation is None:
            raise DriverError(CUresult.CUDA_ERROR_NOT_FOUND, f"no variable {text}")
        return real.CUdeviceptr(allocation.address), allocation.size

    @api(1)
    def cuFuncGetAttribute(self, attrib: Any, hfunc: Any) -> Any:
        function = self.lookup(hfunc, Function)
        kernel, (major, minor) = function.kernel, self.profile.capability
        table = {
            _ATTRIBUTE.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: min(1024, kernel.max_threads),
            _ATTRIBUTE.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: kernel.static_shared,
            _ATTRIBUTE.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: kernel.local_bytes,
            _ATTRIBUTE.CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES: 0,
            _ATTRIBUTE.CU_FUNC_ATTRIBUTE_NUM_REGS: 64,  # not known before ptxas: a plausible figure
            _ATTRIBUTE.CU_FUNC_ATTRIBUTE_PTX_VERSION: major * 10 + minor,
            _ATTRIBUTE.CU_FUNC_ATTRIBUTE_BINARY_VERSION: major * 10 + minor,
            _ATTRIBUTE.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: function.max_dynamic_shared,
        }
        if attrib not in table:
            raise DriverError(CUresult.CUDA_ERROR_INVALID_VALUE, f"attribute {attrib}")
        return table[attrib]

    @api()
    def cuFuncSetAttribute(self, hfunc: Any, attrib: Any, value: int) -> None:
        function = self.lookup(hfunc, Function)
        if attrib == _ATTRIBUTE.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            if value + function.kernel.static_shared > self.profile.shared_per_block_optin:
                raise DriverError(CUresult.CUDA_ERROR_INVALID_VALUE, f"{value} bytes of shared memory")
            function.max_dynamic_shared = value
        elif attrib != _ATTRIBUTE.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
            raise DriverError(CUresult.CUDA_ERROR_INVALID_VALUE, f"attribute {attrib}")

    @api(1)
    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, func: Any, blockSize: int, dynamicSMemSize: int) -> Any:
        kernel = self.lookup(func, Function).kernel
        shared = kernel.dynamic_offset + dynamicSMemSize + 1024
        by_threads = self.profile.threads_per_sm // (-(-blockSize // 32) * 32)
        return max(0, min(self.profile.blocks_per_sm, by_threads, self.profile.shared_per_sm // shared))

    def cuLaunchKernelEx(self, config: Any, f: Any, kernelParams: Any, extra: Any) -> Any:
        return self.cuLaunchKernel(
            f, config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, config.blockDimY,
            config.blockDimZ, config.sharedMemBytes, config.hStream, kernelParams, extra,
        )  # fmt: skip

    @api()
    def cuLaunchKernel(
        self, f: Any, gridDimX: int, gridDimY: int, gridDimZ: int, blockDimX: int, blockDimY: int, blockDimZ: int,
        sharedMemBytes: int, hStream: Any, kernelParams: Any, extra: Any,
    ) -> None:  # fmt: skip
        function = self.lookup(f, Function)
        grid = (int(gridDimX), int(gridDimY), int(gridDimZ))
        block = (int(blockDimX), int(blockDimY), int(blockDimZ))
        self._check_launch(function, grid, block, sharedMemBytes)
        if extra:
            raise DriverError(CUresult.CUDA_ERROR_INVALID_VALUE, "the `extra` form is not modelled")
        params = read_params(function.kernel, kernelParams)
        touches = np.frombuffer(params[: len(params) // 8 * 8], np.uint64).tolist()
        self._enqueue_launch(function, grid, block, int(sharedMemBytes), hStream, params, touches)

    def _enqueue_launch(
        self, function: Function, grid: Any, block: Any, shared: int, stream: Any, params: bytes, touches: list[int]
    ) -> Op:
        def run() -> None:
            self.launch_number += 1
            num_ctas = grid[0] * grid[1] * grid[2]
            launch = Launch(
                function.kernel, self.memory, grid, block, shared, params, self.launch_number, self.next_tag,
                self.config,
            )  # fmt: skip
            launch.moves_poison = function.moves_poison
            self.next_tag += num_ctas + 1
            if self.next_tag > 2**30:
                self.memory.writer[:] = 0
                self.memory.reader[:] = 0
                self.next_tag = 1
            self.launches.append(launch.run())

        return self.scheduler.enqueue(self.stream(stream), function.kernel.name, run, touches)

    def _check_launch(self, function: Function, grid: Any, block: Any, shared: int) -> None:
        kernel = function.kernel
        threads = block[0] * block[1] * block[2]
        problems = [
            (min(grid) < 1 or grid[0] >= 2**31 or max(grid[1:]) > 65535, f"grid {grid}"),
            (min(block) < 1 or threads > 1024 or block[2] > 64, f"block {block}"),
            (threads > kernel.max_threads, f"{threads} threads, the kernel allows {kernel.max_threads}"),
            (
                shared > function.max_dynamic_shared,
                f"{shared} bytes of dynamic shared memory and {kernel.static_shared} static; the function allows "
                f"{function.max_dynamic_shared} dynamic",
            ),
        ]
        for is_wrong, what in problems:
            if is_wrong:
                raise DriverError(CUresult.CUDA_ERROR_INVALID_VALUE, f"launch of {kernel.name}: {what}")
