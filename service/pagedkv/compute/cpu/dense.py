"""The decoder's dense operations on the CPU: weights read as their file stores them, float32 activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagedkv.compute.backend import Float32Array, Int32Array, Rotation, WeightData
from pagedkv.compute.cpu import attention_steps, dense_kernels, dense_tiles, quant, quant_emit, threads
from pagedkv.compute.cpu.compile_cache import Kernel, compile_kernel
from pagedkv.compute.cpu.dense_buffers import CACHE_LINE, BufferPool
from pagedkv.compute.cpu.features import Isa
from pagedkv.compute.cpu.quant import StorageKind, check_weight
from pagedkv.compute.cpu.threads import Recording, WorkerPool, address_of

_SOURCES: Final = tuple(
    str(module.__file__) for module in (attention_steps, dense_kernels, dense_tiles, quant, quant_emit, threads)
)
_ITEMS_A_THREAD: Final = 4  # so that a thread that wakes late or is interrupted does not hold up the others
_SERIAL_ELEMENTS: Final = 1 << 14  # smaller row operations end before another thread wakes
_MULTIPLE: Final = dense_tiles.PANEL_MULTIPLE
_ROW_KERNELS: Final = ("rms_norm", "add_rms_norm", "silu_mul", "rope")


@dataclass(frozen=True, slots=True)
class CpuWeight:
    """A stored matrix, or a float32 vector where `kind` is None."""

    kind: StorageKind | None
    shape: tuple[int, ...]
    data: npt.NDArray[Any]  # bytes of the matrix, rows padded to whole parts; or the vector itself
    num_inputs: int = 0  # of the stored matrix, padding included
    address: int = 0

    def step_words(self) -> tuple[int, int, int]:
        """Return inputs, bytes and kernel steps of a stored row."""
        assert self.kind is not None
        return self.num_inputs, self.kind.row_bytes(self.num_inputs), self.num_inputs // self.kind.multiple


@dataclass(frozen=True, slots=True)
class _Rotations:
    """Cosines and sines [num_tokens, num_pairs] of the last positions: the same for all layers of a step."""

    key: tuple[bytes, float]
    recording: Recording | None
    inv_freq: Float32Array
    cosines: Float32Array
    sines: Float32Array

    def matches(self, key: tuple[bytes, float], recording: Recording | None, inv_freq: Float32Array) -> bool:
        return self.key == key and self.recording is recording and self.inv_freq is inv_freq


class CpuDenseOps:
    """Implements DenseOps with compiled kernels; see the protocol for what each operation does.

    A row's result never depends on the rows beside it: every dot product is summed in one order.
    """

    def __init__(self, isa: Isa, workers: WorkerPool) -> None:
        self._isa = isa
        self._workers = workers
        self._dense_kernels: dict[str, Kernel] = {}
        self._kinds: set[str] = set()
        self._buffers = BufferPool()
        self._panels: list[Float32Array] = []
        self._angles: _Rotations | None = None

    def dense_kernel_makers(self) -> dict[str, Callable[[], Kernel]]:
        """Return a name and a maker for each kernel that the weights loaded so far need."""
        names = list(_ROW_KERNELS) if self._kinds else []
        names += [f"{what}-{kind}" for kind in sorted(self._kinds) for what in ("direct", "linear", "embed")]
        return {name: partial(self._dense_kernel, name) for name in names}

    # -- weights ------------------------------------------------------------------------------------------------

    def load_weight(self, weight: WeightData) -> CpuWeight:
        """See DenseOps.load_weight. Matrices stay memory-mapped unless their rows need padding."""
        kind = check_weight(weight)
        data = np.ascontiguousarray(weight.data)
        if len(weight.shape) == 1 and kind.name == "F32":
            return CpuWeight(None, weight.shape, data.reshape(-1).view(np.float32))
        num_outputs, num_inputs = (1, *weight.shape)[-2:]
        rows = data.reshape(num_outputs, -1)
        padded_inputs = _round_up(num_inputs, kind.multiple)
        if padded_inputs != num_inputs:
            padded = np.zeros((num_outputs, kind.row_bytes(padded_inputs)), np.uint8)
            padded[:, : rows.shape[1]] = rows
            rows = padded
        matrix = CpuWeight(kind, (num_outputs, num_inputs), rows, padded_inputs, address_of(rows))
        if len(weight.shape) == 1:
            return CpuWeight(None, weight.shape, self.embedding(matrix, np.zeros(1, np.int32))[0].copy())
        self._kinds.add(kind.name)
        return matrix

    # -- operations ---------------------------------------------------------------------------------------------

    def embedding(self, table: CpuWeight, token_ids: Int32Array) -> Float32Array:
        """See DenseOps.embedding."""
        assert table.kind is not None
        ids = np.ascontiguousarray(token_ids, np.int32)
        out = self._take((len(ids), table.num_inputs))
        if len(ids):
            args = self._matrix_args(table, ids, 4, out, len(ids))
            self._run(f"embed-{table.kind.name}", args, parallel=out.size >= _SERIAL_ELEMENTS)
        return out[:, : table.shape[1]]

    def linear(self, x: Float32Array, weight: CpuWeight, bias: CpuWeight | None = None) -> Float32Array:
        """See DenseOps.linear."""
        return self.linear_many(x, [weight], [bias])[0]

    def linear_many(
        self,
        x: Float32Array,
        weights: Sequence[CpuWeight],
        biases: Sequence[CpuWeight | None] | None = None,
    ) -> list[Float32Array]:
        """See DenseOps.linear_many: one parallel region."""
        num_rows = len(x)
        outs = [self._take((num_rows, _round_up(weight.shape[0], _MULTIPLE))) for weight in weights]
        if num_rows:
            self._multiply(x, weights, outs)
        results = [out[:, : weight.shape[0]] for out, weight in zip(outs, weights, strict=True)]
        for result, bias in zip(results, biases or (), strict=biases is not None):
            if bias is not None:
                self._add_bias(result, bias)
        return results

    def _multiply(self, x: Float32Array, weights: Sequence[CpuWeight], outs: Sequence[Float32Array]) -> None:
        num_rows = len(x)
        is_direct = num_rows <= dense_kernels.most_direct_rows(self._isa.width)
        what = "direct" if is_direct else "linear"
        rows = self._kernel_rows(x, weights[0].num_inputs)
        launches: list[tuple[Kernel, npt.NDArray[np.int64]]] = []
        for weight, out in zip(weights, outs, strict=True):
            assert weight.kind is not None
            size = self._item_outputs(weight, is_direct)
            args = self._matrix_args(weight, rows, 4 * weight.num_inputs, out, -(-weight.shape[0] // size))
            args[dense_kernels.ITEM_OUTPUTS // 8] = size
            if not is_direct:
                self._set_panels(len(launches), size * weight.num_inputs, args)
            launches.append((self._dense_kernel(f"{what}-{weight.kind.name}"), args))
        held = () if is_direct else tuple(self._panels)
        if len(launches) == 1:
            self._workers.run(*launches[0], held)
        else:
            self._workers.run_together(launches, held)

    def _add_bias(self, x: Float32Array, bias: CpuWeight) -> None:
        self._not_recorded()
        x += bias.data

    def add_rms_norm(self, x: Float32Array, y: Float32Array, weight: CpuWeight, epsilon: float) -> Float32Array:
        """See DenseOps.add_rms_norm."""
        if x.shape[-1] % self._isa.width or not (x.flags.c_contiguous and y.flags.c_contiguous):
            return self.rms_norm(self.add(x, y), weight, epsilon)
        out = self._take(x.shape)
        args = _row_args(x, weight.data, out, epsilon, address_of(y))
        self._run("add_rms_norm", args, parallel=x.size >= _SERIAL_ELEMENTS)
        return out

    def rms_norm(self, x: Float32Array, weight: CpuWeight, epsilon: float) -> Float32Array:
        """See DenseOps.rms_norm."""
        x = self._contiguous(x)
        out = self._take(x.shape)
        if x.shape[-1] % self._isa.width:
            self._not_recorded()
            scale = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + epsilon)
            return (x * scale.astype(np.float32)) * weight.data
        args = _row_args(x, weight.data, out, epsilon)
        self._run("rms_norm", args, parallel=x.size >= _SERIAL_ELEMENTS)
        return out

    def add(self, x: Float32Array, y: Float32Array) -> Float32Array:
        """See DenseOps.add."""
        self._not_recorded()
        x += y
        return x

    def silu_mul(self, gate: Float32Array, up: Float32Array) -> Float32Array:
        """See DenseOps.silu_mul."""
        size = gate.shape[-1]
        if size % self._isa.width:
            self._not_recorded()
            return gate / (1 + np.exp(-gate)) * up
        gate, up = self._contiguous(gate), self._contiguous(up)
        out = self._take(gate.shape)
        self._run("silu_mul", _row_args(gate, up, out), parallel=gate.size >= _SERIAL_ELEMENTS)
        return out

    def rope(self, x: Float32Array, positions: Int32Array, rotation: Rotation) -> None:
        """See DenseOps.rope."""
        if not x.flags.c_contiguous:
            raise ValueError("rope rotates contiguous arrays in place")
        cosines, sines = self._rotations(positions, rotation.inv_freq, rotation.scale)
        num_tokens, num_heads, head_dim = x.shape
        num_pairs = len(rotation.inv_freq)
        strides = (8, 4) if rotation.interleaved else (4, 4 * num_pairs)
        words = (
            0,
            num_tokens,
            address_of(x),
            address_of(cosines),
            address_of(sines),
            num_heads,
            head_dim,
            num_pairs,
            *strides,
        )
        args = np.array(words, np.int64)
        self._run("rope", args, parallel=x.size >= _SERIAL_ELEMENTS)

    def take_rows(self, x: Float32Array, rows: Int32Array) -> Float32Array:
        """See DenseOps.take_rows."""
        self._not_recorded()
        return x[rows]

    def split(self, x: Float32Array, sizes: Sequence[int]) -> list[Float32Array]:
        """See DenseOps.split."""
        self._not_recorded()
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
        if kind:
            makers = {
                "direct": dense_kernels.make_direct_kernel,
                "linear": dense_kernels.make_linear_kernel,
                "embed": dense_kernels.make_embed_kernel,
            }
            return makers[what](width, quant.KINDS[kind])
        if what == "rope":
            return dense_kernels.rope_kernel
        if what == "silu_mul":
            return dense_kernels.make_silu_mul_kernel(width)
        return dense_kernels.make_rms_norm_kernel(width, is_sum=what == "add_rms_norm")

    def _run(self, name: str, args: npt.NDArray[np.int64], *, parallel: bool = True) -> None:
        self._workers.run(self._dense_kernel(name), args, parallel=parallel)

    def _take(self, shape: tuple[int, ...]) -> Float32Array:
        """Return uninitialised memory: of the record that is being made, if any."""
        recording = self._workers.recording
        return self._buffers.take(shape) if recording is None else recording.take(shape)

    def _contiguous(self, x: Float32Array) -> Float32Array:
        if x.flags.c_contiguous:
            return x
        self._not_recorded()
        return np.ascontiguousarray(x)

    def _not_recorded(self) -> None:
        """Say that NumPy does something that a repetition of the launches would lack."""
        if (recording := self._workers.recording) is not None:
            recording.give_up()

    def _matrix_args(
        self, weight: CpuWeight, x: npt.NDArray[Any], x_bytes: int, out: Float32Array, num_items: int
    ) -> npt.NDArray[np.int64]:
        inputs, row_bytes, num_steps = weight.step_words()
        addresses = (address_of(x), weight.address, address_of(out))
        sizes = (len(x), inputs, weight.shape[0], row_bytes, 0, 0, 0, x_bytes, 4 * out.shape[1], num_steps)
        return np.array((0, num_items, *addresses, *sizes), np.int64)

    def _item_outputs(self, weight: CpuWeight, is_direct: bool) -> int:
        """Return how many outputs a thread takes at a time: a few items a thread, panels within their limit."""
        size = _round_up(-(-weight.shape[0] // (_ITEMS_A_THREAD * self._workers.num_threads)), _MULTIPLE)
        return size if is_direct else min(size, dense_kernels.panel_outputs(weight.num_inputs))

    def _kernel_rows(self, x: Float32Array, num_inputs: int) -> Float32Array:
        """Return x as rows of `num_inputs` values, on whole cache lines where many tiles will read them."""
        is_whole = x.shape[1] == num_inputs and x.flags.c_contiguous
        if is_whole and (len(x) <= 8 or address_of(x) % CACHE_LINE == 0):
            return x
        self._not_recorded()
        rows = self._take((len(x), num_inputs))
        rows[:, x.shape[1] :] = 0
        rows[:, : x.shape[1]] = x
        return rows

    def _set_panels(self, place: int, panel_size: int, args: npt.NDArray[np.int64]) -> None:
        """Give each thread a panel of float32 for the weight at this place among those multiplied together."""
        size = _round_up(panel_size, CACHE_LINE // 4)
        if place == len(self._panels):
            self._panels.append(np.empty(0, np.float32))
        if self._panels[place].size < self._workers.num_threads * size:
            self._panels[place] = self._buffers.take((self._workers.num_threads * size,))
        args[dense_kernels.SCRATCH // 8] = address_of(self._panels[place])
        args[dense_kernels.SCRATCH_BYTES // 8] = 4 * size

    def _rotations(
        self, positions: Int32Array, inv_freq: Float32Array, scale: float
    ) -> tuple[Float32Array, Float32Array]:
        """Return cosines and sines [num_tokens, num_pairs], computed once for all layers of a step."""
        recording = self._workers.recording
        key = (positions.tobytes(), scale)
        known = self._angles
        if known is not None and known.matches(key, recording, inv_freq):
            return known.cosines, known.sines
        cosines, sines = (np.empty((len(positions), len(inv_freq)), np.float32) for _ in range(2))

        def turn() -> None:
            angles = positions.astype(np.float64)[:, None] * inv_freq.astype(np.float64)
            cosines[...] = np.cos(angles) * scale
            sines[...] = np.sin(angles) * scale

        turn()
        self._angles = _Rotations(key, recording, inv_freq, cosines, sines)
        if recording is not None:
            recording.before_replay(turn)
        return cosines, sines


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _row_args(
    x: Float32Array, second: npt.NDArray[Any], out: Float32Array, epsilon: float = 0.0, added: int = 0
) -> npt.NDArray[np.int64]:
    size = x.shape[-1]
    words = (0, x.size // max(1, size), address_of(x), address_of(second), address_of(out), size, 0, added)
    args = np.array(words, np.int64)
    args.view(np.float64)[dense_kernels.EPSILON // 8] = epsilon
    return args
