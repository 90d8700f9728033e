"""The decoder's dense operations on the CPU, float32 activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagedkv.compute.backend import Float32Array, Int32Array, Rotation
from pagedkv.compute.cpu import dense_rows
from pagedkv.compute.cpu.compile_cache import Kernel
from pagedkv.compute.cpu.dense_linear import CpuLinearOps, CpuWeight, RoundedRows
from pagedkv.compute.cpu.dense_runtime import SERIAL_ELEMENTS
from pagedkv.compute.cpu.features import Isa
from pagedkv.compute.cpu.threads import Recording, WorkerPool, address_of

Activations = Float32Array | RoundedRows

_ROW_KERNELS: Final = ("rms_norm", "add_rms_norm", "silu_mul", "rope", "add_bias", "take_rows")


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


class CpuDenseOps(CpuLinearOps):
    """Implements DenseOps with compiled kernels; see the protocol for what each operation does."""

    def __init__(self, isa: Isa, workers: WorkerPool, *, activations: str = "float32") -> None:
        super().__init__(isa, workers, activations=activations)
        self._angles: _Rotations | None = None

    def dense_kernel_makers(self) -> dict[str, Callable[[], Kernel]]:
        """Return a name and a maker for each kernel that the weights loaded so far need."""
        names = [*_ROW_KERNELS, *self.linear_kernel_names()] if self._kinds else []
        return {name: partial(self._dense_kernel, name) for name in names}

    def add_rms_norm(
        self, x: Float32Array, y: Float32Array, weight: CpuWeight, epsilon: float, readers: Sequence[CpuWeight] = ()
    ) -> Activations:
        """See DenseOps.add_rms_norm."""
        if x.shape[-1] % self._isa.width or not (x.flags.c_contiguous and y.flags.c_contiguous):
            return self.rms_norm(self.add(x, y), weight, epsilon, readers)
        return self._row_operation("add_rms_norm", x, weight.data, readers, epsilon, address_of(y))

    def rms_norm(
        self, x: Float32Array, weight: CpuWeight, epsilon: float, readers: Sequence[CpuWeight] = ()
    ) -> Activations:
        """See DenseOps.rms_norm."""
        x = self._contiguous(x)
        if x.shape[-1] % self._isa.width:
            self._not_recorded()
            scale = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + epsilon)
            return (x * scale.astype(np.float32)) * weight.data
        return self._row_operation("rms_norm", x, weight.data, readers, epsilon)

    def add(self, x: Float32Array, y: Float32Array) -> Float32Array:
        """See DenseOps.add."""
        self._not_recorded()
        x += y
        return x

    def silu_mul(self, gate: Float32Array, up: Float32Array, readers: Sequence[CpuWeight] = ()) -> Activations:
        """See DenseOps.silu_mul."""
        if gate.shape[-1] % self._isa.width:
            self._not_recorded()
            return gate / (1 + np.exp(-gate)) * up
        return self._row_operation("silu_mul", self._contiguous(gate), self._contiguous(up), readers)

    def _row_operation(
        self,
        name: str,
        x: Float32Array,
        second: Float32Array,
        readers: Sequence[CpuWeight],
        epsilon: float = 0.0,
        added: int = 0,
    ) -> Activations:
        """Run a row kernel and return its result: rounded, if all `readers` read it so."""
        if not self._are_integer(readers):
            out = self._take(x.shape)
            self._run(name, _row_args(x, second, out, epsilon, added), parallel=x.size >= SERIAL_ELEMENTS)
            return out
        rounded, scratch = self._take_rounded(x.shape), self._take((self._workers.num_threads, x.shape[-1]))
        args = _row_args(x, second, rounded.blocks, epsilon, added, address_of(scratch))
        self._run(f"rounded-{name}", args, parallel=x.size >= SERIAL_ELEMENTS)
        return rounded

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
        self._run("rope", args, parallel=x.size >= SERIAL_ELEMENTS)

    def take_rows(self, x: Float32Array, rows: Int32Array) -> Float32Array:
        """See DenseOps.take_rows; IndexError for a row outside x, in a repetition too."""
        if x.shape[-1] % self._isa.width or rows.dtype != np.int32 or not x.flags.c_contiguous:
            self._not_recorded()
            return x[rows]
        check = partial(_check_rows, rows, len(x))
        check()
        if (recording := self._workers.recording) is not None:
            recording.before_replay(check)
        out = self._take((len(rows), x.shape[-1]))
        args = _row_args(x, rows, out)
        args[1] = len(rows)
        self._workers.run(self._dense_kernel("take_rows"), args, (rows,), parallel=out.size >= SERIAL_ELEMENTS)
        return out

    def split(self, x: Float32Array, sizes: Sequence[int]) -> list[Float32Array]:
        """See DenseOps.split."""
        self._not_recorded()
        return [np.ascontiguousarray(part) for part in np.split(x, np.cumsum(sizes)[:-1], axis=-1)]

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


def _check_rows(rows: Int32Array, num_rows: int) -> None:
    if rows.size and not 0 <= rows.min() <= rows.max() < num_rows:
        raise IndexError(f"rows must be in [0, {num_rows}), got {rows.min()} to {rows.max()}")


def _row_args(
    x: Float32Array, second: npt.NDArray[Any], out: Float32Array, epsilon: float = 0.0, added: int = 0, scratch: int = 0
) -> npt.NDArray[np.int64]:
    size = x.shape[-1]
    words = (0, x.size // max(1, size), address_of(x), address_of(second), address_of(out), size, 0, added, scratch)
    args = np.array(words, np.int64)
    args.view(np.float64)[dense_rows.EPSILON // 8] = epsilon
    return args
