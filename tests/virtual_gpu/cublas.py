"""Dense products for the virtual GPU: `VirtualCublas` has the names of `nvmath.bindings.cublas` that are used.

Column-major, as cuBLAS: C[m, n] = alpha op(A)[m, k] op(B)[k, n] + beta C. The product is computed by NumPy on the
virtual GPU's memory when the stream gets there, so that missing events show as they do with kernels.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from virtual_gpu import checks, floats
from virtual_gpu.faults import GpuFault
from virtual_gpu.virtual_driver import VirtualDriver

# cudaDataType_t
_TYPES: dict[int, Any] = {0: np.dtype(np.float32), 1: np.dtype(np.float64), 2: np.dtype(np.float16), 14: floats.BF16}


class CublasError(Exception):
    """A cuBLAS call with bad arguments or a bad handle."""


@dataclass
class Matrix:
    """A column-major matrix on the device: element (i, j) at address + (i + j * leading) * itemsize."""

    address: int
    rows: int
    columns: int
    leading: int
    dtype: Any

    @property
    def nbytes(self) -> int:
        return ((self.columns - 1) * self.leading + self.rows) * int(self.dtype.itemsize)


class VirtualCublas:
    """Stands in for the module `nvmath.bindings.cublas`, over one VirtualDriver."""

    def __init__(self, driver: VirtualDriver) -> None:
        self.driver = driver
        self.streams: dict[int, Any] = {}
        self.workspaces: dict[int, int] = {}  # the bytes each handle was given
        self.num_products = 0

    def create(self) -> int:
        handle = self.driver.new_handle(self)
        self.streams[handle] = 0
        return handle

    def destroy(self, handle: int) -> None:
        self._require(handle)
        del self.streams[handle]

    def set_stream(self, handle: int, stream_id: Any) -> None:
        self._require(handle)
        self.streams[handle] = stream_id
        self.workspaces.pop(handle, None)  # as in cuBLAS

    def get_stream(self, handle: int) -> int:
        self._require(handle)
        return int(self.streams[handle])

    def set_workspace(self, handle: int, workspace: Any, workspace_size_in_bytes: int) -> None:
        self._require(handle)
        span = self.driver.memory.span(int(workspace), workspace_size_in_bytes)
        if span is None or int(workspace) % 256:
            raise CublasError(f"a workspace of {workspace_size_in_bytes} bytes at {int(workspace):#x}")
        self.workspaces[handle] = workspace_size_in_bytes

    def set_math_mode(self, handle: int, mode: Any) -> None:
        self._require(handle)

    def set_pointer_mode(self, handle: int, mode: Any) -> None:
        self._require(handle)
        if int(mode) != 0:
            raise CublasError("only scalars on the host are modelled")

    def get_version(self, handle: int) -> int:
        return 130000

    def _require(self, handle: int) -> None:
        if handle not in self.streams:
            raise CublasError(f"{handle:#x} is not a live cuBLAS handle")

    def sgemm(
        self, handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: Any, a: Any, lda: int, b: Any,
        ldb: int, beta: Any, c: Any, ldc: int,
    ) -> None:  # fmt: skip
        """Float32 product."""
        self.gemm_ex(handle, transa, transb, m, n, k, alpha, a, 0, lda, b, 0, ldb, beta, c, 0, ldc, 68, -1)

    def gemm_ex(
        self, handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: Any, a: Any, atype: int, lda: int,
        b: Any, btype: int, ldb: int, beta: Any, c: Any, ctype: int, ldc: int, compute_type: int, algo: int,
    ) -> None:  # fmt: skip
        """Product of mixed types, accumulated in float32 (float64 where C is). `alpha`, `beta`: host addresses."""
        self._require(handle)
        kinds = [_TYPES.get(int(t)) for t in (atype, btype, ctype)]
        if None in kinds or min(m, n, k) < 1:
            raise CublasError(f"gemm_ex of types {(atype, btype, ctype)}, m {m}, n {n}, k {k}")
        left = Matrix(int(a), *((m, k) if int(transa) == 0 else (k, m)), lda, kinds[0])
        right = Matrix(int(b), *((k, n) if int(transb) == 0 else (n, k)), ldb, kinds[1])
        result = Matrix(int(c), m, n, ldc, kinds[2])
        for matrix in (left, right, result):
            if matrix.leading < matrix.rows:
                raise CublasError(f"leading dimension {matrix.leading} of a matrix with {matrix.rows} rows")
        scalars = np.float64 if kinds[2] == np.float64 else np.float32
        factors = (_scalar(alpha, scalars), _scalar(beta, scalars))

        def run() -> None:
            self._multiply(left, right, result, (int(transa) != 0, int(transb) != 0), factors)

        stream = self.driver.stream(self.streams[handle])
        if stream.capture is not None and handle not in self.workspaces:
            raise CublasError("a product under capture without a workspace allocates memory in the graph")
        self.driver.scheduler.enqueue(stream, "cublas gemm", run, (left.address, right.address, result.address))

    def _multiply(
        self, left: Matrix, right: Matrix, result: Matrix, transposed: tuple[bool, bool], factors: tuple[Any, Any]
    ) -> None:
        alpha, beta = factors
        wide = np.float64 if result.dtype == np.float64 else np.float32
        a, b = (self._view(x, True).astype(wide) for x in (left, right))
        product = (a.T if transposed[0] else a) @ (b.T if transposed[1] else b) * alpha
        target = self._view(result, beta != 0)
        if beta != 0:
            product = product + beta * target.astype(wide)
        target[...] = product.astype(result.dtype)
        self._shadow(result)[...] = checks.INITIALISED
        self.num_products += 1

    def _range(self, matrix: Matrix) -> slice:
        memory = self.driver.memory
        span = memory.span(matrix.address, matrix.nbytes)
        if span is None or matrix.address % matrix.dtype.itemsize:
            where = memory.describe(matrix.address)
            raise GpuFault("out of bounds", f"matrix {matrix}, {where}", "cublas gemm", address=matrix.address)
        return span

    def _strided(self, data: Any, matrix: Matrix, width: int) -> Any:
        column = matrix.leading * int(matrix.dtype.itemsize)
        return np.lib.stride_tricks.as_strided(data, (matrix.rows, matrix.columns), (width, column))

    def _view(self, matrix: Matrix, must_be_written: bool) -> Any:
        data = self.driver.memory.data[self._range(matrix)].view(matrix.dtype)
        if must_be_written and (self._shadow(matrix) != checks.INITIALISED).any():
            raise GpuFault("uninitialised read", f"matrix {matrix}", "cublas gemm", address=matrix.address)
        return self._strided(data, matrix, int(matrix.dtype.itemsize))

    def _shadow(self, matrix: Matrix) -> Any:
        """State of the matrix's bytes [rows, columns, itemsize]."""
        shadow = self.driver.memory.shadow[self._range(matrix)]
        width = int(matrix.dtype.itemsize)
        shape = (matrix.rows, matrix.columns, width)
        return np.lib.stride_tricks.as_strided(shadow, shape, (width, matrix.leading * width, 1))


def _scalar(pointer: Any, dtype: Any) -> Any:
    """A host scalar given by address, by ctypes object or by array."""
    if hasattr(pointer, "__array_interface__"):
        return dtype(np.asarray(pointer).ravel()[0])
    if hasattr(pointer, "value"):
        return dtype(pointer.value)
    size = np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(int(pointer), size), dtype)[0]
