"""The kernels of linear layers over activations that are rounded to int16, and the launches that use them."""

from __future__ import annotations

from typing import Final

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt

from pagedkv.compute.cpu import dense_kernels as dk
from pagedkv.compute.cpu.attention_steps import Step, compiled
from pagedkv.compute.cpu.dense_int16_tiles import (
    BLOCK_INPUTS,
    GROUP_OUTPUTS,
    INTEGER_KINDS,
    PANEL_BLOCK_BYTES,
    ROW_BLOCK_BYTES,
    IntegerKind,
    make_expand_group,
    make_int16_tile,
    make_quantize_row,
)
from pagedkv.compute.cpu.features import Isa
from pagedkv.compute.cpu.simd import load_i64
from pagedkv.compute.cpu.threads import claim

PANEL_GROUPS: Final = 2  # expanded at a time by a thread
PANEL_OUTPUTS: Final = PANEL_GROUPS * GROUP_OUTPUTS
_ROWS: Final = (6, 4, 2, 1)  # of a tile


def is_int16_usable(isa: Isa) -> bool:
    """Whether this machine multiplies int16 pairs (AVX-512 VNNI) and the kernels may use it."""
    return isa.name == "avx512" and bool(llvm.get_host_cpu_features().get("avx512vnni", False))


def is_integer_weight(kind: str, num_outputs: int, num_inputs: int) -> bool:
    """Whether a stored matrix can be multiplied as integers."""
    return kind in INTEGER_KINDS and num_outputs % GROUP_OUTPUTS == 0 and num_inputs % BLOCK_INPUTS == 0


def row_bytes(num_inputs: int) -> int:
    """Bytes of a quantised row."""
    return num_inputs // BLOCK_INPUTS * ROW_BLOCK_BYTES


def panel_bytes(num_inputs: int) -> int:
    """Bytes of scratch that a thread needs."""
    return PANEL_GROUPS * num_inputs // BLOCK_INPUTS * PANEL_BLOCK_BYTES


def quantize_args(x: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return the arguments of the quantising kernel; `out` holds `row_bytes` a row."""
    words = np.zeros(dk.NUM_WORDS, np.int64)
    words[1] = len(x)
    words[dk.X // 8], words[dk.OUT // 8] = x.__array_interface__["data"][0], out.__array_interface__["data"][0]
    words[dk.X_BYTES // 8], words[dk.OUT_BYTES // 8] = x.strides[0], out.strides[0]
    words[dk.NUM_BLOCKS // 8] = x.shape[1] // BLOCK_INPUTS
    return words


def make_quantize_kernel() -> dk.KernelBody:
    """Return the kernel that rounds rows to int16; an item is a row."""
    quantize_row = make_quantize_row()

    def quantize(args: int, thread: int) -> None:
        item = claim(args)
        while item >= 0:
            x = load_i64(args + dk.X) + item * load_i64(args + dk.X_BYTES)
            out = load_i64(args + dk.OUT) + item * load_i64(args + dk.OUT_BYTES)
            quantize_row(x, out, load_i64(args + dk.NUM_BLOCKS))
            item = claim(args)

    return quantize


def make_int16_kernel(kind: IntegerKind) -> dk.KernelBody:
    """Return the kernel out = x @ weights.T over quantised rows; an item is a run of outputs.

    A thread expands the rows of 32 outputs to int16 pairs at a time, and applies them to all rows of x.
    """
    expand = _make_expand(kind)
    both, single = _make_apply(kind, PANEL_GROUPS), _make_apply(kind, 1)

    def multiply(args: int, thread: int) -> None:
        outputs, size = load_i64(args + dk.NUM_OUTPUTS), load_i64(args + dk.ITEM_OUTPUTS)
        panel = load_i64(args + dk.SCRATCH) + thread * load_i64(args + dk.SCRATCH_BYTES)
        group_bytes = load_i64(args + dk.NUM_BLOCKS) * PANEL_BLOCK_BYTES
        item = claim(args)
        while item >= 0:
            stop = min(outputs, (item + 1) * size)
            for n in range(item * size, stop, PANEL_OUTPUTS):
                expand(args, n, panel)
                if n + GROUP_OUTPUTS < stop:
                    expand(args, n + GROUP_OUTPUTS, panel + group_bytes)
                    both(args, n, panel)
                else:
                    single(args, n, panel)
            item = claim(args)

    return multiply


def _make_expand(kind: IntegerKind) -> Step:
    expand_group = make_expand_group(kind)

    @compiled
    def expand(args: int, n: int, panel: int) -> None:
        row_bytes = load_i64(args + dk.ROW_BYTES)
        source = load_i64(args + dk.WEIGHTS) + n * row_bytes
        expand_group(source, row_bytes, panel, load_i64(args + dk.NUM_BLOCKS))

    return expand


def _make_apply(kind: IntegerKind, groups: int) -> Step:
    """Return the step that multiplies all rows with the groups of a panel."""
    tiles = [make_int16_tile(rows, groups, has_minimum=kind.has_minimum) for rows in _ROWS]
    six, four, two, one = tiles

    @compiled
    def apply(args: int, n: int, panel: int) -> None:
        num_rows, blocks = load_i64(args + dk.NUM_ROWS), load_i64(args + dk.NUM_BLOCKS)
        x_bytes, out_bytes = load_i64(args + dk.X_BYTES), load_i64(args + dk.OUT_BYTES)
        group_bytes = blocks * PANEL_BLOCK_BYTES
        row = 0
        while row < num_rows:
            left = num_rows - row
            x, out = load_i64(args + dk.X) + row * x_bytes, load_i64(args + dk.OUT) + row * out_bytes + 4 * n
            if left > 4 and left != 8:
                six(x, x_bytes, left - 1, panel, group_bytes, blocks, out, out_bytes)
                row += 6
            elif left > 2:
                four(x, x_bytes, left - 1, panel, group_bytes, blocks, out, out_bytes)
                row += 4
            elif left == 2:
                two(x, x_bytes, left - 1, panel, group_bytes, blocks, out, out_bytes)
                row += 2
            else:
                one(x, x_bytes, left - 1, panel, group_bytes, blocks, out, out_bytes)
                row += 1

    return apply


def make_body(name: str) -> dk.KernelBody:
    """Return the kernel of a name: "quantize", or "int16-" and a kind."""
    what, _, kind = name.partition("-")
    return make_int16_kernel(INTEGER_KINDS[kind]) if what == "int16" else make_quantize_kernel()
