"""What a decoder needs besides the cache: products by cuBLAS, the rest by the kernels of cudasrc."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pagedkv.compute.backend import Float32Array, Int32Array, Rotation, WeightData
from pagedkv.compute.cuda.array import DeviceArray
from pagedkv.compute.cuda.device import require_array
from pagedkv.compute.cuda.kernels import norm_variant, plain_variant
from pagedkv.compute.cuda.kv_ops import CudaKvOps
from pagedkv.compute.dequantize import dequantize
from pagedkv.config import require
from pagedkv.dtypes import DType
from pagedkv.errors import UnsupportedModel

_PLAIN: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_NUMPY: dict[DType, Any] = {
    DType.FLOAT32: np.float32,
    DType.FLOAT16: np.float16,
    DType.BFLOAT16: ml_dtypes.bfloat16,
}
_GGML_NAMES = {DType.FLOAT32: "F32", DType.FLOAT16: "F16", DType.BFLOAT16: "BF16"}
_CUDA_TYPES = (0, 2, 14)  # cudaDataType of the storage codes: R_32F, R_16F, R_16BF
_COMPUTE_32F, _DEFAULT_ALGORITHM = 68, -1
_WORKSPACE, _HOPPER_WORKSPACE = 4 << 20, 32 << 20  # bytes that cuBLAS would take by itself


class CudaDenseOps(CudaKvOps):
    """`DenseOps` on a device. `cublas` has the names of `nvmath.bindings.cublas`; None means no dense products.

    Matrices stay in their file's float type; quantised ones become `weight_dtype` once, at load. Activations are
    float32 and are rounded to a 16-bit matrix's type for the product, which is accumulated in float32.
    """

    _cublas: Any = None
    _handle: Any = None
    _weight_dtype: DType = DType.FLOAT16

    def open_cublas(self, cublas: Any, weight_dtype: DType) -> None:
        """Take the bindings; the first product opens them, for a cache without a model needs none."""
        require(weight_dtype in _NUMPY, "weight_dtype", "must be a float type", weight_dtype)
        self._cublas, self._weight_dtype, self._handle = cublas, weight_dtype, None
        self._factors = np.array([1.0, 0.0], np.float32)  # alpha, beta; lives as long as the handle

    def close_cublas(self) -> None:
        """Destroy the handle."""
        if self._handle is not None:
            self._cublas.destroy(self._handle)
        self._cublas = self._handle = None

    def _open_handle(self) -> int:
        """Return the handle. Its workspace is ours: cuBLAS would allocate one in the midst of a captured step."""
        if self._handle is None:
            handle = self._handle = self._cublas.create()
            self._cublas.set_stream(handle, int(self.device.streams.compute))
            size = _HOPPER_WORKSPACE if self.device.context.info.capability[0] >= 9 else _WORKSPACE
            self._workspace = self.device.lasting(size)
            self._cublas.set_workspace(handle, self._workspace.pointer, size)  # last: a new stream takes it away
        return self._handle

    def stored_kind(self, kind: str) -> str:
        """See `DenseOps.stored_kind`."""
        return kind if kind in _PLAIN else _GGML_NAMES[self._weight_dtype]

    def load_weight(self, weight: WeightData) -> DeviceArray:
        """See `DenseOps.load_weight`; vectors become float32."""
        if weight.kind in _PLAIN:
            values = np.ascontiguousarray(weight.data).reshape(-1).view(_PLAIN[weight.kind]).reshape(weight.shape)
        else:
            values = dequantize(weight, _NUMPY[self._weight_dtype])
        return self.device.upload(values.astype(np.float32) if len(weight.shape) == 1 else values)

    def embedding(self, table: DeviceArray, token_ids: Int32Array) -> DeviceArray:
        """See `DenseOps.embedding`."""
        return self._gather(table, token_ids, table.shape[-1])

    def take_rows(self, x: DeviceArray, rows: Int32Array) -> DeviceArray:
        """See `DenseOps.take_rows`."""
        return self._gather(x, rows, math.prod(x.shape[1:])).reshape((len(rows), *x.shape[1:]))

    def _gather(self, table: DeviceArray, rows: Int32Array, width: int) -> DeviceArray:
        code = require_array(table, "table")
        if len(rows):
            self.device.check(("rows", id(rows), len(table)), lambda: _check_rows(rows, len(table)))
        y = self.device.scratch.empty((len(rows), width), np.float32)
        if len(rows):
            index = self.device.input(rows, np.int32)
            variant = plain_variant("embedding", SOURCE=code)
            self.device.launch(variant, (len(rows), 1, 1), table.pointer, index.pointer, y.pointer, width)
        return y

    def linear(self, x: DeviceArray, weight: DeviceArray, bias: DeviceArray | None = None) -> DeviceArray:
        """See `DenseOps.linear`. Raises UnsupportedModel without cuBLAS."""
        return self.linear_many(x, [weight], [bias])[0]

    def linear_many(
        self,
        x: DeviceArray,
        weights: Sequence[DeviceArray],
        biases: Sequence[DeviceArray | None] | None = None,
    ) -> list[DeviceArray]:
        """See `DenseOps.linear_many`; x is rounded once for each type of the weights."""
        if self._cublas is None:
            raise UnsupportedModel("dense products need cuBLAS: install pagedkv[cuda]")
        for weight in weights:
            fits = x.shape[-1] == weight.shape[1]
            require(fits, "x", f"must have {weight.shape[1]} features", x.shape, weight.shape[1])
        codes = [require_array(weight, "weight") for weight in weights]
        rounded = {code: self.cast(x, code) for code in dict.fromkeys(codes)}
        products = [self._multiply(rounded[code], weight, code) for code, weight in zip(codes, weights, strict=True)]
        return [
            product if bias is None else self._add(product, bias)
            for product, bias in zip(products, biases or [None] * len(weights), strict=True)
        ]

    def _multiply(self, x: DeviceArray, weight: DeviceArray, code: int) -> DeviceArray:
        num_outputs, num_inputs = weight.shape
        num_rows = x.size // num_inputs
        y = self.device.scratch.empty((*x.shape[:-1], num_outputs), np.float32)
        if num_rows:
            self._gemm(x, weight, y, (num_outputs, num_rows, num_inputs), _CUDA_TYPES[code])
        return y

    def _gemm(
        self, x: DeviceArray, weight: DeviceArray, y: DeviceArray, sizes: tuple[int, int, int], kind: int
    ) -> None:
        """y[n, m] = x[n, k] @ weight[m, k].T in row-major terms; cuBLAS counts columns first."""
        m, n, k = sizes
        alpha, beta = self._factors.ctypes.data, self._factors.ctypes.data + 4
        operands = (weight.pointer, kind, k, x.pointer, kind, k)
        self._cublas.gemm_ex(
            self._open_handle(),
            1,
            0,
            m,
            n,
            k,
            alpha,
            *operands,
            beta,
            y.pointer,
            0,
            m,
            _COMPUTE_32F,
            _DEFAULT_ALGORITHM,
        )

    def rms_norm(
        self, x: DeviceArray, weight: DeviceArray, epsilon: float, readers: Sequence[DeviceArray] = ()
    ) -> DeviceArray:
        """See `DenseOps.rms_norm`; float32 whoever reads it."""
        return self._rms_norm(x, None, weight, epsilon)

    def add_rms_norm(
        self,
        x: DeviceArray,
        y: DeviceArray,
        weight: DeviceArray,
        epsilon: float,
        readers: Sequence[DeviceArray] = (),
    ) -> DeviceArray:
        """See `DenseOps.add_rms_norm`; one launch."""
        require(x.shape == y.shape, "y", f"must have shape {x.shape}", y.shape)
        return self._rms_norm(x, self.as_float32(y), weight, epsilon)

    def _rms_norm(
        self, x: DeviceArray, residual: DeviceArray | None, weight: DeviceArray, epsilon: float
    ) -> DeviceArray:
        """Return the norm of x, or of x + residual, which replaces x."""
        width = x.shape[-1]
        require(weight.shape == (width,), "weight", f"must have shape ({width},)", weight.shape)
        y, gain = self.device.scratch.empty(x.shape, np.float32), self.as_float32(weight)
        if x.size:
            other = 0 if residual is None else residual.pointer
            pointers = (x.pointer, other, gain.pointer, y.pointer)
            variant = norm_variant(width, add=residual is not None)
            self.device.launch(variant, (x.size // width, 1, 1), *pointers, width, epsilon)
        return y

    def add(self, x: DeviceArray, y: DeviceArray) -> DeviceArray:
        """See `DenseOps.add`."""
        require(x.shape == y.shape, "y", f"must have shape {x.shape}", y.shape)
        return self._add(x, y)

    def _add(self, x: DeviceArray, y: DeviceArray) -> DeviceArray:
        other = self.as_float32(y)
        self.device.launch_items(plain_variant("add"), x.size, x.pointer, other.pointer, x.size, max(1, y.size))
        return x

    def silu_mul(self, gate: DeviceArray, up: DeviceArray, readers: Sequence[DeviceArray] = ()) -> DeviceArray:
        """See `DenseOps.silu_mul`."""
        y = self.device.scratch.empty(gate.shape, np.float32)
        self.device.launch_items(plain_variant("silu_mul"), y.size, gate.pointer, up.pointer, y.pointer, y.size)
        return y

    def rope(self, x: DeviceArray, positions: Int32Array, rotation: Rotation) -> None:
        """See `DenseOps.rope`."""
        num_tokens, num_heads, head_dim = x.shape
        require(len(positions) == num_tokens, "positions", f"must have {num_tokens} entries", len(positions))
        self.device.launch_items(
            plain_variant("rope"),
            num_tokens * num_heads * len(rotation.inv_freq),
            x.pointer,
            self.device.input(positions, np.int32).pointer,
            self.device.input(rotation.inv_freq, np.float32).pointer,
            num_tokens,
            num_heads,
            head_dim,
            len(rotation.inv_freq),
            rotation.interleaved,
            rotation.scale,
        )

    def split(self, x: DeviceArray, sizes: Sequence[int]) -> list[DeviceArray]:
        """See `DenseOps.split`."""
        width, num_rows = x.shape[-1], x.size // x.shape[-1]
        require(sum(sizes) == width, "sizes", f"must add up to {width}", tuple(sizes), width)
        parts, first = [], 0
        for size in sizes:
            part = self.device.scratch.empty((*x.shape[:-1], size), np.float32)
            count = num_rows * size
            self.device.launch_items(plain_variant("split"), count, x.pointer, part.pointer, count, size, width, first)
            parts.append(part)
            first += size
        return parts

    def sample(self, logits: DeviceArray, temperatures: Float32Array, seeds: npt.NDArray[np.uint64]) -> DeviceArray:
        """Draw a token from each row of logits [num_rows, vocab_size]; temperature 0 is greedy. Returns int32."""
        num_rows, vocab_size = logits.shape
        tokens = self.device.scratch.empty((num_rows,), np.int32)
        if num_rows:
            inputs = (self.device.input(temperatures, np.float32), self.device.input(seeds, np.uint64))
            pointers = (logits.pointer, inputs[0].pointer, inputs[1].pointer, tokens.pointer)
            self.device.launch(plain_variant("sample"), (num_rows, 1, 1), *pointers, vocab_size)
        return tokens


def _check_rows(rows: Int32Array, limit: int) -> None:
    low, high = int(rows.min()), int(rows.max())
    require(low >= 0 and high < limit, "rows", f"must be in [0, {limit})", (low, high), limit - 1)
