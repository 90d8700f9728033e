"""Linear layers and embeddings on the CPU: weights read as their file stores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagedkv.compute.backend import Float32Array, Int32Array, WeightData
from pagedkv.compute.cpu import dense_integer, dense_integer_tiles, dense_kernels, dense_rows, dense_tiles
from pagedkv.compute.cpu.compile_cache import Kernel
from pagedkv.compute.cpu.dense_buffers import CACHE_LINE
from pagedkv.compute.cpu.dense_rounding import BLOCK_INPUTS, ROUNDINGS
from pagedkv.compute.cpu.dense_runtime import ROUNDED_ROWS, SERIAL_ELEMENTS, DenseRuntime
from pagedkv.compute.cpu.features import Isa
from pagedkv.compute.cpu.quant import StorageKind, as_kernels_read, check_weight, stored_kind
from pagedkv.compute.cpu.threads import WorkerPool, address_of
from pagedkv.config import ACTIVATIONS, require

Launch = tuple[Kernel, npt.NDArray[np.int64]]

_ITEMS_A_THREAD: Final = 4  # so that a thread that wakes late or is interrupted does not hold up the others
_MULTIPLE: Final = dense_tiles.PANEL_MULTIPLE


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
class RoundedRows:
    """Activations of `shape` as blocks of integers with their scales: what linear layers over integer weights read."""

    blocks: Float32Array  # memory of that size
    shape: tuple[int, int]


class CpuLinearOps(DenseRuntime):
    """Linear layers whose every dot product is summed in one order: a row never depends on the rows beside it.

    `activations` "int16" and "int8" round the inputs of layers over Q4_0, Q4_1 and Q8_0, relative to the largest of 32
    neighbours, where the machine has instructions for it; elsewhere they change nothing.
    """

    def __init__(self, isa: Isa, workers: WorkerPool, *, activations: str = "float32") -> None:
        require(activations in ACTIVATIONS, "activations", f"must be one of {ACTIVATIONS}", activations, ACTIVATIONS)
        rounding = ROUNDINGS[activations] if activations in ROUNDINGS and dense_integer.has_integer_dots(isa) else None
        super().__init__(isa, workers, rounding)
        self._kinds: set[str] = set()
        self._panels: list[Float32Array] = []

    def linear_kernel_names(self) -> list[str]:
        """Return the kernels that the weights loaded so far need."""
        rounding, names = self._rounding, []
        if rounding is not None:
            names = ["quantize", *(f"rounded-{name}" for name in ROUNDED_ROWS)]
        for kind in sorted(self._kinds):
            is_integer = rounding is not None and kind in dense_integer_tiles.INTEGER_KINDS[rounding.name]
            names += [f"{what}-{kind}" for what in (("integer",) if is_integer else ("direct", "linear"))]
            names.append(f"embed-{kind}")
        return names

    def stored_kind(self, kind: str) -> str:
        """See DenseOps.stored_kind."""
        return stored_kind(kind)

    def load_weight(self, weight: WeightData) -> CpuWeight:
        """See DenseOps.load_weight. Matrices stay memory-mapped unless converted or their rows need padding."""
        weight = as_kernels_read(weight)
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

    def embedding(self, table: CpuWeight, token_ids: Int32Array) -> Float32Array:
        """See DenseOps.embedding."""
        assert table.kind is not None
        ids = np.ascontiguousarray(token_ids, np.int32)
        out = self._take((len(ids), table.num_inputs))
        if len(ids):
            args = self._matrix_args(table, ids, out, 1)
            args[1] = len(ids)
            self._run(f"embed-{table.kind.name}", args, parallel=out.size >= SERIAL_ELEMENTS)
        return out[:, : table.shape[1]]

    def linear(self, x: Float32Array | RoundedRows, weight: CpuWeight, bias: CpuWeight | None = None) -> Float32Array:
        """See DenseOps.linear."""
        return self.linear_many(x, [weight], [bias])[0]

    def linear_many(
        self,
        x: Float32Array | RoundedRows,
        weights: Sequence[CpuWeight],
        biases: Sequence[CpuWeight | None] | None = None,
    ) -> list[Float32Array]:
        """See DenseOps.linear_many: one parallel region."""
        num_rows = x.shape[0]
        outs = [self._take((num_rows, _round_up(weight.shape[0], _MULTIPLE))) for weight in weights]
        if num_rows:
            self._multiply(x, weights, outs)
        results = [out[:, : weight.shape[0]] for out, weight in zip(outs, weights, strict=True)]
        for result, bias in zip(results, biases or (), strict=biases is not None):
            if bias is not None:
                self._add_bias(result, bias)
        return results

    def _multiply(
        self, x: Float32Array | RoundedRows, weights: Sequence[CpuWeight], outs: Sequence[Float32Array]
    ) -> None:
        rounded: RoundedRows | None = None
        launches = []
        for place, (weight, out) in enumerate(zip(weights, outs, strict=True)):
            if self._is_integer(weight):
                rounded = rounded or self._rounded(x)
                launches.append(self._integer_launch(rounded.blocks, weight, out, place))
            elif isinstance(x, RoundedRows):
                raise ValueError("rows were rounded for other weights than these")
            else:
                launches.append(self._float_launch(x, weight, out, place))
        if len(launches) == 1:
            self._workers.run(*launches[0], tuple(self._panels))
        else:
            self._workers.run_together(launches, tuple(self._panels))

    def _float_launch(self, x: Float32Array, weight: CpuWeight, out: Float32Array, place: int) -> Launch:
        assert weight.kind is not None
        is_direct = len(x) <= dense_kernels.most_direct_rows(self._isa.width)
        rows = self._kernel_rows(x, weight.num_inputs)
        size = self._item_outputs(weight)
        if not is_direct:
            size = min(size, dense_kernels.panel_outputs(weight.num_inputs))
        args = self._matrix_args(weight, rows, out, size)
        if not is_direct:
            self._set_panel(place, 4 * size * weight.num_inputs, args)
        return self._dense_kernel(f"{'direct' if is_direct else 'linear'}-{weight.kind.name}"), args

    def _integer_launch(self, rounded: Float32Array, weight: CpuWeight, out: Float32Array, place: int) -> Launch:
        assert weight.kind is not None
        assert self._rounding is not None
        size = _round_up(self._item_outputs(weight), dense_integer.PANEL_OUTPUTS)
        args = self._matrix_args(weight, rounded, out, size)
        args[dense_kernels.NUM_BLOCKS // 8] = weight.num_inputs // BLOCK_INPUTS
        self._set_panel(place, dense_integer.panel_bytes(self._rounding, weight.num_inputs), args)
        return self._dense_kernel(f"integer-{weight.kind.name}"), args

    def _rounded(self, x: Float32Array | RoundedRows) -> RoundedRows:
        if isinstance(x, RoundedRows):
            return x
        x = self._contiguous(x)
        rounded = self._take_rounded(x.shape)
        self._run("quantize", dense_integer.quantize_args(x, rounded.blocks), parallel=x.size >= SERIAL_ELEMENTS)
        return rounded

    def _take_rounded(self, shape: tuple[int, ...]) -> RoundedRows:
        assert self._rounding is not None
        num_rows, num_inputs = shape
        return RoundedRows(self._take((num_rows, self._rounding.row_bytes(num_inputs) // 4)), (num_rows, num_inputs))

    def _are_integer(self, readers: Sequence[CpuWeight]) -> bool:
        """Whether there are readers and all of them multiply rounded rows."""
        return bool(readers) and all(self._is_integer(weight) for weight in readers)

    def _is_integer(self, weight: CpuWeight) -> bool:
        assert weight.kind is not None
        rounding = self._rounding
        return rounding is not None and dense_integer.is_integer_weight(rounding, weight.kind.name, *weight.shape)

    def _add_bias(self, x: Float32Array, bias: CpuWeight) -> None:
        if x.shape[1] % self._isa.width:
            self._not_recorded()
            x += bias.data
            return
        args = np.zeros(dense_kernels.NUM_WORDS, np.int64)
        args[1] = len(x)
        args[dense_kernels.X // 8], args[dense_rows.SECOND // 8] = address_of(x), address_of(bias.data)
        args[dense_rows.WIDTH // 8], args[dense_kernels.X_BYTES // 8] = x.shape[1], x.strides[0]
        self._run("add_bias", args, parallel=x.size >= SERIAL_ELEMENTS)

    def _matrix_args(
        self, weight: CpuWeight, x: npt.NDArray[Any], out: Float32Array, item_outputs: int
    ) -> npt.NDArray[np.int64]:
        inputs, row_bytes, num_steps = weight.step_words()
        num_items = -(-weight.shape[0] // item_outputs)
        addresses = (address_of(x), weight.address, address_of(out))
        sizes = (len(x), inputs, weight.shape[0], row_bytes, 0, 0, item_outputs, x.strides[0], out.strides[0])
        return np.array((0, num_items, *addresses, *sizes, num_steps), np.int64)

    def _item_outputs(self, weight: CpuWeight) -> int:
        """Return how many outputs a thread takes at a time: a few items a thread."""
        return _round_up(-(-weight.shape[0] // (_ITEMS_A_THREAD * self._workers.num_threads)), _MULTIPLE)

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

    def _set_panel(self, place: int, num_bytes: int, args: npt.NDArray[np.int64]) -> None:
        """Give each thread a panel for the weight at this place among those multiplied together."""
        size = _round_up(num_bytes, CACHE_LINE)
        while place >= len(self._panels):
            self._panels.append(np.empty(0, np.float32))
        if self._panels[place].nbytes < self._workers.num_threads * size:
            self._panels[place] = self._buffers.take((self._workers.num_threads * size // 4,))
        args[dense_kernels.SCRATCH // 8] = address_of(self._panels[place])
        args[dense_kernels.SCRATCH_BYTES // 8] = size


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
