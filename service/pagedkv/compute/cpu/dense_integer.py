"""The kernels of linear layers over activations that are rounded to integers, and what launches them needs."""

from __future__ import annotations

from typing import Final

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt

from pagedkv.compute.cpu import dense_kernels as dk
from pagedkv.compute.cpu.attention_steps import Step, compiled
from pagedkv.compute.cpu.dense_integer_tiles import (
    GROUP_OUTPUTS,
    INTEGER_KINDS,
    IntegerKind,
    make_expand_group,
    make_integer_tile,
    panel_block_bytes,
)
from pagedkv.compute.cpu.dense_rounding import BLOCK_INPUTS, Rounding, make_quantize_row
from pagedkv.compute.cpu.features import Isa
from pagedkv.compute.cpu.simd import load_i64
from pagedkv.compute.cpu.threads import claim

PANEL_GROUPS: Final = 2  # expanded at a time by a thread
PANEL_OUTPUTS: Final = PANEL_GROUPS * GROUP_OUTPUTS
_ROWS: Final = (6, 4, 2, 1)  # of a tile


def has_integer_dots(isa: Isa) -> bool:
    """Whether this machine has dot products of integers (AVX-512 VNNI) and the kernels may use them."""
    return isa.name == "avx512" and bool(llvm.get_host_cpu_features().get("avx512vnni", False))


def is_integer_weight(rounding: Rounding, kind: str, num_outputs: int, num_inputs: int) -> bool:
    """Whether a stored matrix can be multiplied as integers."""
    is_known = kind in INTEGER_KINDS[rounding.name]
    return is_known and num_outputs % GROUP_OUTPUTS == 0 and num_inputs % BLOCK_INPUTS == 0


def panel_bytes(rounding: Rounding, num_inputs: int) -> int:
    """Bytes of scratch that a thread needs."""
    return PANEL_GROUPS * num_inputs // BLOCK_INPUTS * panel_block_bytes(rounding)


def quantize_args(x: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return the arguments of the quantising kernel; `out` holds `row_bytes` a row."""
    words = np.zeros(dk.NUM_WORDS, np.int64)
    words[1] = len(x)
    words[dk.X // 8], words[dk.OUT // 8] = x.__array_interface__["data"][0], out.__array_interface__["data"][0]
    words[dk.X_BYTES // 8], words[dk.OUT_BYTES // 8] = x.strides[0], out.strides[0]
    words[dk.NUM_BLOCKS // 8] = x.shape[1] // BLOCK_INPUTS
    return words


def make_quantize_kernel(rounding: Rounding) -> dk.KernelBody:
    """Return the kernel that rounds rows; an item is a row."""
    quantize_row = make_quantize_row(rounding)

    def quantize(args: int, thread: int) -> None:
        item = claim(args)
        while item >= 0:
            x = load_i64(args + dk.X) + item * load_i64(args + dk.X_BYTES)
            out = load_i64(args + dk.OUT) + item * load_i64(args + dk.OUT_BYTES)
            quantize_row(x, out, load_i64(args + dk.NUM_BLOCKS))
            item = claim(args)

    return quantize


def make_integer_kernel(rounding: Rounding, kind_name: str) -> dk.KernelBody:
    """Return the kernel out = x @ weights.T over rounded rows; an item is a run of outputs.

    A thread expands the weights of 32 outputs at a time, and applies them to all rows of x.
    """
    kind, block_bytes = INTEGER_KINDS[rounding.name][kind_name], panel_block_bytes(rounding)
    expand = _make_expand(kind, rounding)
    both, single = _make_apply(kind, rounding, PANEL_GROUPS), _make_apply(kind, rounding, 1)

    def multiply(args: int, thread: int) -> None:
        outputs, size = load_i64(args + dk.NUM_OUTPUTS), load_i64(args + dk.ITEM_OUTPUTS)
        panel = load_i64(args + dk.SCRATCH) + thread * load_i64(args + dk.SCRATCH_BYTES)
        group_bytes = load_i64(args + dk.NUM_BLOCKS) * block_bytes
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


def _make_expand(kind: IntegerKind, rounding: Rounding) -> Step:
    expand_group = make_expand_group(kind, rounding)

    @compiled
    def expand(args: int, n: int, panel: int) -> None:
        row_bytes = load_i64(args + dk.ROW_BYTES)
        source = load_i64(args + dk.WEIGHTS) + n * row_bytes
        expand_group(source, row_bytes, panel, load_i64(args + dk.NUM_BLOCKS))

    return expand


def _make_apply(kind: IntegerKind, rounding: Rounding, groups: int) -> Step:
    """Return the step that multiplies all rows with the groups of a panel."""
    six, four, two, one = (make_integer_tile(rows, groups, kind, rounding) for rows in _ROWS)
    block_bytes = panel_block_bytes(rounding)

    @compiled
    def apply(args: int, n: int, panel: int) -> None:
        num_rows, blocks = load_i64(args + dk.NUM_ROWS), load_i64(args + dk.NUM_BLOCKS)
        x_bytes, out_bytes = load_i64(args + dk.X_BYTES), load_i64(args + dk.OUT_BYTES)
        group_bytes = blocks * block_bytes
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
