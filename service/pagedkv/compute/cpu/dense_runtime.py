"""What all dense operations share: compiled kernels by name, memory of activations, and how a launch is recorded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from pagedkv.compute.backend import Float32Array
from pagedkv.compute.cpu import (
    attention_steps,
    dense_integer,
    dense_integer_tiles,
    dense_kernels,
    dense_rounding,
    dense_rows,
    dense_tiles,
    quant,
    quant_emit,
    threads,
)
from pagedkv.compute.cpu.attention_steps import Step
from pagedkv.compute.cpu.compile_cache import Kernel, compile_kernel
from pagedkv.compute.cpu.dense_buffers import BufferPool
from pagedkv.compute.cpu.dense_rounding import Rounding
from pagedkv.compute.cpu.features import Isa
from pagedkv.compute.cpu.threads import WorkerPool

SERIAL_ELEMENTS: Final = 1 << 14  # smaller row operations end before another thread wakes

_SOURCES: Final = tuple(
    str(module.__file__)
    for module in (attention_steps, dense_kernels, dense_rounding, dense_rows, dense_tiles, quant, quant_emit, threads)
)
_INTEGER_SOURCES: Final = (*_SOURCES, str(dense_integer.__file__), str(dense_integer_tiles.__file__))
_MATRIX_KERNELS: Final[dict[str, Callable[..., dense_kernels.KernelBody]]] = {
    "direct": dense_kernels.make_direct_kernel,
    "linear": dense_kernels.make_linear_kernel,
    "embed": dense_kernels.make_embed_kernel,
}

_ROWS: Final[dict[str, Callable[[int], Step]]] = {
    "rms_norm": dense_rows.make_rms_norm_row,
    "add_rms_norm": partial(dense_rows.make_rms_norm_row, is_sum=True),
    "silu_mul": dense_rows.make_silu_mul_row,
    "take_rows": dense_rows.make_take_rows_row,
}
ROUNDED_ROWS: Final = ("rms_norm", "add_rms_norm", "silu_mul")  # kernels "rounded-..." write rounded rows


class DenseRuntime:
    """Runs dense kernels on the workers' threads; a kernel is compiled or loaded when it is first needed."""

    def __init__(self, isa: Isa, workers: WorkerPool, rounding: Rounding | None) -> None:
        self._isa = isa
        self._workers = workers
        self._rounding = rounding  # of the inputs of linear layers over integer weights
        self._dense_kernels: dict[str, Kernel] = {}
        self._buffers = BufferPool()

    def _dense_kernel(self, name: str) -> Kernel:
        kernel = self._dense_kernels.get(name)
        if kernel is None:
            what, _, kind = name.partition("-")
            if what in ("integer", "quantize", "rounded"):
                assert self._rounding is not None
                body, sources = _integer_body(self._rounding, what, kind, self._isa.width), _INTEGER_SOURCES
                full_name = f"{self._rounding.name}-{name}-{self._isa.name}"
            else:
                body, sources, full_name = _body(what, kind, self._isa.width), _SOURCES, f"{name}-{self._isa.name}"
            kernel = compile_kernel(body, full_name, (self._isa.width, full_name), sources)
            self._dense_kernels[name] = kernel
        return kernel

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


def _integer_body(rounding: Rounding, what: str, kind: str, width: int) -> dense_kernels.KernelBody:
    if what == "integer":
        return dense_integer.make_integer_kernel(rounding, kind)
    if what == "quantize":
        return dense_integer.make_quantize_kernel(rounding)
    return dense_rows.make_rounded_kernel(_ROWS[kind](width), rounding)


def _body(what: str, kind: str, width: int) -> dense_kernels.KernelBody:
    if kind:
        return _MATRIX_KERNELS[what](width, quant.KINDS[kind])
    if what == "rope":
        return dense_rows.rope_kernel
    return (
        dense_rows.make_add_bias_kernel(width) if what == "add_bias" else dense_rows.make_row_kernel(_ROWS[what](width))
    )
