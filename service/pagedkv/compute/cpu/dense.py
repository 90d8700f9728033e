"""The decoder's dense operations on the CPU: weights read as their file stores them, float32 activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagedkv.compute.backend import Float32Array, Int32Array, WeightData
from pagedkv.compute.cpu import attention_steps, dense_kernels, dense_tiles, quant, threads
from pagedkv.compute.cpu.compile_cache import Kernel, compile_kernel
from pagedkv.compute.cpu.features import Isa
from pagedkv.compute.cpu.quant import PLAIN_ALIGNMENT, StorageKind, check_weight
from pagedkv.compute.cpu.threads import WorkerPool

_SOURCES: Final = tuple(
    str(module.__file__) for module in (attention_steps, dense_kernels, dense_tiles, quant, threads)
)
_ITEMS_A_THREAD: Final = 4  # so that a thread that wakes late or is interrupted does not hold up the others
_SERIAL_ELEMENTS: Final = 1 << 14  # smaller row operations end before another thread wakes


@dataclass(frozen=True, slots=True)
class CpuWeight:
    """A stored matrix [num_outputs, num_inputs], or a float32 vector where `kind` is None."""

    kind: StorageKind | None
    shape: tuple[int, ...]
    data: npt.NDArray[Any]  # bytes of the matrix, rows padded to whole vectors; or the vector itself
    num_outputs: int  # of the stored matrix, padding included
    num_inputs: int


class CpuDenseOps:
    """Implements DenseOps with compiled kernels; see the protocol for what each operation does.

    A row's result never depends on the rows beside it: every dot product is summed in one order.
    """

    def __init__(self, isa: Isa, workers: WorkerPool) -> None:
        self._isa = isa
        self._workers = workers
        self._dense_kernels: dict[str, Kernel] = {}
        self._kinds: set[str] = set()
        self._scratch = np.empty(0, np.float32)
        self._angles: tuple[object, object, float, Float32Array, Float32Array] | None = None

    def dense_kernel_makers(self) -> dict[str, Callable[[], Kernel]]:
        """Return a name and a maker for each kernel that the weights loaded so far need."""
        names = ["rms_norm", "silu_mul", "rope"] if self._kinds else []
        names += [f"{what}-{kind}" for kind in sorted(self._kinds) for what in ("linear", "embed")]
        return {name: partial(self._dense_kernel, name) for name in names}

    # -- weights ------------------------------------------------------------------------------------------------

    def load_weight(self, weight: WeightData) -> CpuWeight:
        """See DenseOps.load_weight. Matrices stay memory-mapped unless their shape needs padding."""
        kind = check_weight(weight)
        if len(weight.shape) == 1:
            return CpuWeight(None, weight.shape, weight.data.view(np.float32), 0, 0)
        self._kinds.add(kind.name)
        num_outputs, num_inputs = weight.shape
        padded_outputs = -(-num_outputs // dense_kernels.PANEL_OUTPUTS) * dense_kernels.PANEL_OUTPUTS
        padded_inputs = -(-num_inputs // PLAIN_ALIGNMENT) * PLAIN_ALIGNMENT
        rows = weight.data.reshape(num_outputs, -1)
        if (padded_outputs, padded_inputs) != (num_outputs, num_inputs):
            padded = np.zeros((padded_outputs, kind.row_bytes(padded_inputs)), np.uint8)
            padded[:num_outputs, : rows.shape[1]] = rows
            rows = padded
        return CpuWeight(kind, weight.shape, rows, padded_outputs, padded_inputs)

    # -- operations ---------------------------------------------------------------------------------------------

    def embedding(self, table: CpuWeight, token_ids: Int32Array) -> Float32Array:
        """See DenseOps.embedding."""
        assert table.kind is not None
        ids = np.ascontiguousarray(token_ids, np.int32)
        out = np.empty((len(ids), table.num_inputs), np.float32)
        if len(ids):
            args = self._matrix_args(table, ids, out, len(ids))
            self._run(f"embed-{table.kind.name}", args, parallel=out.size >= _SERIAL_ELEMENTS)
        return out[:, : table.shape[1]]

    def linear(self, x: Float32Array, weight: CpuWeight, bias: CpuWeight | None = None) -> Float32Array:
        """See DenseOps.linear."""
        assert weight.kind is not None
        rows = self._padded_rows(x, weight.num_inputs)
        out = np.empty((len(rows), weight.num_outputs), np.float32)
        if len(rows):
            num_panels = weight.num_outputs // dense_kernels.PANEL_OUTPUTS
            panels_an_item = max(1, num_panels // (_ITEMS_A_THREAD * self._workers.num_threads))
            args = self._matrix_args(weight, rows, out, -(-num_panels // panels_an_item))
            scratch_bytes = 4 * dense_kernels.PANEL_OUTPUTS * weight.num_inputs
            args[dense_kernels.SCRATCH // 8] = self._scratch_address(scratch_bytes)
            args[dense_kernels.SCRATCH_BYTES // 8] = scratch_bytes
            args[dense_kernels.ITEM_OUTPUTS // 8] = panels_an_item * dense_kernels.PANEL_OUTPUTS
            self._run(f"linear-{weight.kind.name}", args)
        result = out[:, : weight.shape[0]]
        if bias is not None:
            result += bias.data
        return result

    def rms_norm(self, x: Float32Array, weight: CpuWeight, epsilon: float) -> Float32Array:
        """See DenseOps.rms_norm."""
        x = np.ascontiguousarray(x)
        out = np.empty_like(x)
        if x.shape[-1] % self._isa.width:
            scale = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + epsilon)
            return (x * scale.astype(np.float32)) * weight.data
        args = _row_args(x, weight.data, out)
        args[dense_kernels.EPSILON // 8 :][:1].view(np.float64)[0] = epsilon
        self._run("rms_norm", args, parallel=x.size >= _SERIAL_ELEMENTS)
        return out

    def add(self, x: Float32Array, y: Float32Array) -> Float32Array:
        """See DenseOps.add."""
        x += y
        return x

    def silu_mul(self, gate: Float32Array, up: Float32Array) -> Float32Array:
        """See DenseOps.silu_mul."""
        size = gate.shape[-1]
        if size % self._isa.width:
            return gate / (1 + np.exp(-gate)) * up
        gate, up = np.ascontiguousarray(gate), np.ascontiguousarray(up)
        out = np.empty_like(gate)
        self._run("silu_mul", _row_args(gate, up, out), parallel=gate.size >= _SERIAL_ELEMENTS)
        return out

    def rope(
        self, x: Float32Array, positions: Int32Array, inv_freq: Float32Array, *, interleaved: bool, scale: float
    ) -> None:
        """See DenseOps.rope."""
        if not x.flags.c_contiguous:
            raise ValueError("rope rotates contiguous arrays in place")
        cosines, sines = self._rotations(positions, inv_freq, scale)
        num_tokens, num_heads, head_dim = x.shape
        num_pairs = len(inv_freq)
        strides = (8, 4) if interleaved else (4, 4 * num_pairs)
        words = (
            0,
            num_tokens,
            _address(x),
            _address(cosines),
            _address(sines),
            num_heads,
            head_dim,
            num_pairs,
            *strides,
        )
        args = np.array(words, np.int64)
        self._run("rope", args, parallel=x.size >= _SERIAL_ELEMENTS)

    def take_rows(self, x: Float32Array, rows: Int32Array) -> Float32Array:
        """See DenseOps.take_rows."""
        return x[rows]

    def split(self, x: Float32Array, sizes: Sequence[int]) -> list[Float32Array]:
        """See DenseOps.split."""
        return [np.ascontiguousarray(part) for part in np.split(x, np.cumsum(sizes)[:-1], axis=-1)]

    # -- private ------------------------------------------------------------------------------------------------

    def _dense_kernel(self, name: str) -> Kernel:
        kernel = self._dense_kernels.get(name)
        if kernel is None:
            kernel = compile_kernel(self._body(name), f"{name}-{self._isa.name}", (self._isa.width, name), _SOURCES)
            self._dense_kernels[name] = kernel
        return kernel

    def _body(self, name: str) -> dense_kernels.KernelBody:
        what, _, kind = name.partition("-")
        width = self._isa.width
        if what == "linear":
            return dense_kernels.make_linear_kernel(width, quant.KINDS[kind])
        if what == "embed":
            return dense_kernels.make_embed_kernel(width, quant.KINDS[kind])
        if what == "rope":
            return dense_kernels.rope_kernel
        make = {"rms_norm": dense_kernels.make_rms_norm_kernel, "silu_mul": dense_kernels.make_silu_mul_kernel}[what]
        return make(width)

    def _run(self, name: str, args: npt.NDArray[np.int64], *, parallel: bool = True) -> None:
        kernel = self._dense_kernel(name)
        if parallel:
            self._workers.run(kernel, args)
        else:
            kernel.call(_address(args), 0)

    def _matrix_args(
        self, weight: CpuWeight, x: npt.NDArray[Any], out: Float32Array, num_items: int
    ) -> npt.NDArray[np.int64]:
        assert weight.kind is not None
        args = np.zeros(dense_kernels.NUM_WORDS, np.int64)
        sizes = (len(x), weight.num_inputs, weight.num_outputs, weight.kind.row_bytes(weight.num_inputs))
        args[1:9] = (num_items, _address(x), _address(weight.data), _address(out), *sizes)
        return args

    def _padded_rows(self, x: Float32Array, num_inputs: int) -> Float32Array:
        if x.shape[1] == num_inputs:
            return np.ascontiguousarray(x)
        padded = np.zeros((len(x), num_inputs), np.float32)
        padded[:, : x.shape[1]] = x
        return padded

    def _scratch_address(self, thread_bytes: int) -> int:
        needed = self._workers.num_threads * thread_bytes // 4 + 16
        if len(self._scratch) < needed:
            self._scratch = np.empty(needed, np.float32)
        return -(-_address(self._scratch) // 64) * 64

    def _rotations(
        self, positions: Int32Array, inv_freq: Float32Array, scale: float
    ) -> tuple[Float32Array, Float32Array]:
        """Return cosines and sines [num_tokens, num_pairs], computed once for all layers of a step."""
        known = self._angles
        if known is not None and known[0] is positions and known[1] is inv_freq and known[2] == scale:
            return known[3], known[4]
        angles = positions.astype(np.float64)[:, None] * inv_freq.astype(np.float64)
        cosines, sines = ((turn(angles) * scale).astype(np.float32) for turn in (np.cos, np.sin))
        self._angles = (positions, inv_freq, scale, cosines, sines)
        return cosines, sines


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _row_args(x: Float32Array, second: npt.NDArray[Any], out: Float32Array) -> npt.NDArray[np.int64]:
    size = x.shape[-1]
    words = (0, x.size // max(1, size), _address(x), _address(second), _address(out), size, 0)
    return np.array(words, np.int64)
