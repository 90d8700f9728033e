"""The kernels of linear layers and embeddings. Addresses and strides are int64 bytes; all activations are float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from pagedkv.compute.cpu.attention_steps import Step, compiled
from pagedkv.compute.cpu.dense_tiles import PANEL_MULTIPLE, make_expand_row, make_tile
from pagedkv.compute.cpu.quant import KINDS, StorageKind
from pagedkv.compute.cpu.quant_emit import PLAIN_PART
from pagedkv.compute.cpu.simd import load_i32, load_i64
from pagedkv.compute.cpu.threads import claim

KernelBody = Callable[[Any, Any], Any]

# Argument words of `linear` and `embed`; 0 and 1 are the next item and the number of items (see threads.claim).
X: Final = 16  # float32 [num_rows, num_inputs]; for embed: int32 [num_rows] token ids
WEIGHTS: Final = 24
OUT: Final = 32  # float32 [num_rows, num_outputs], rows padded to a tile
NUM_ROWS: Final = 40
NUM_INPUTS: Final = 48
NUM_OUTPUTS: Final = 56
ROW_BYTES: Final = 64  # of a stored weight row
SCRATCH: Final = 72
SCRATCH_BYTES: Final = 80  # a thread
ITEM_OUTPUTS: Final = 88  # at most a panel
X_BYTES: Final = 96  # from one row of x to the next
OUT_BYTES: Final = 104
NUM_BLOCKS: Final = 112  # steps of kernels over a stored row
NUM_WORDS: Final = 15

_PANEL_BYTES: Final = 1 << 18  # expanded weights: a part of the second-level cache
_PANEL_OUTPUTS: Final = 64
# Tiles (rows, outputs) by vector width: sums and operands of a tile fit the registers.
_DIRECT_TILES: Final = {16: ((1, 4), (2, 4), (4, 4), (8, 2)), 8: ((1, 4), (2, 4), (4, 2)), 4: ((1, 4), (2, 4), (4, 2))}
_PANEL_TILES: Final = {16: ((6, 4), (4, 4)), 8: ((3, 4), (2, 4)), 4: ((3, 4), (2, 4))}


def panel_outputs(num_inputs: int) -> int:
    """Return how many weight rows are expanded to float32 at a time."""
    fitting = _PANEL_BYTES // (4 * num_inputs) // PANEL_MULTIPLE * PANEL_MULTIPLE
    return max(PANEL_MULTIPLE, min(_PANEL_OUTPUTS, fitting))


def most_direct_rows(width: int) -> int:
    """Return the largest number of rows for which weights are used as they are decoded, without a panel."""
    return _DIRECT_TILES[width][-1][0]


def make_direct_kernel(width: int, kind: StorageKind) -> KernelBody:
    """Return the kernel out = x @ weights.T for few rows: weights are decoded in registers and used at once.

    An item is a run of outputs; each stored weight is read once.
    """
    tiles = [make_direct_step(width, kind, rows, outputs) for rows, outputs in _DIRECT_TILES[width]]
    limits = [rows for rows, _ in _DIRECT_TILES[width]]
    one, two, four, most = tiles[0], tiles[1], tiles[2], tiles[-1]
    second, third = limits[1], limits[2]

    def direct(args: int, thread: int) -> None:
        outputs, size = load_i64(args + NUM_OUTPUTS), load_i64(args + ITEM_OUTPUTS)
        num_rows = load_i64(args + NUM_ROWS)
        item = claim(args)
        while item >= 0:
            first, stop = item * size, min(outputs, (item + 1) * size)
            if num_rows == 1:
                one(args, first, stop)
            elif num_rows <= second:
                two(args, first, stop)
            elif num_rows <= third:
                four(args, first, stop)
            else:
                most(args, first, stop)
            item = claim(args)

    return direct


def make_direct_step(width: int, kind: StorageKind, tile_rows: int, tile_outputs: int) -> Step:
    """Return step(args, first, stop): all rows (at most tile_rows) times outputs [first, stop)."""
    tile = make_tile(kind.parts, tile_rows, tile_outputs, width, prefetch=True)

    @compiled
    def step(args: int, first: int, stop: int) -> None:
        x, x_bytes = load_i64(args + X), load_i64(args + X_BYTES)
        last_row, last_output = load_i64(args + NUM_ROWS) - 1, load_i64(args + NUM_OUTPUTS) - 1
        weights, row_bytes = load_i64(args + WEIGHTS), load_i64(args + ROW_BYTES)
        num_blocks, out, out_bytes = load_i64(args + NUM_BLOCKS), load_i64(args + OUT), load_i64(args + OUT_BYTES)
        for n in range(first, stop, tile_outputs):
            source = weights + n * row_bytes
            tile(x, x_bytes, last_row, source, row_bytes, last_output - n, num_blocks, out + 4 * n, out_bytes)

    return step


def make_linear_kernel(width: int, kind: StorageKind) -> KernelBody:
    """Return the kernel out = x @ weights.T for many rows.

    An item is a run of outputs. A thread expands a panel of weight rows to float32 once, into the second-level cache,
    and applies it to all rows, a tile of rows (in the first-level cache) times a tile of outputs in registers.
    """
    expand_row = make_expand_row(kind.parts, width)
    panel_block = PLAIN_PART
    large, small = (make_tile(KINDS["F32"].parts, rows, outputs, width) for rows, outputs in _PANEL_TILES[width])
    large_rows, small_rows = (rows for rows, _ in _PANEL_TILES[width])
    tile_outputs = PANEL_MULTIPLE

    @compiled
    def apply_panel(args: int, panel: int, first: int, stop: int) -> None:
        num_rows, inputs = load_i64(args + NUM_ROWS), load_i64(args + NUM_INPUTS)
        x_bytes, out_bytes = load_i64(args + X_BYTES), load_i64(args + OUT_BYTES)
        panel_bytes, num_blocks = 4 * inputs, inputs // panel_block
        row = 0
        while row < num_rows:
            left = num_rows - row
            x, out = load_i64(args + X) + row * x_bytes, load_i64(args + OUT) + row * out_bytes
            # small tiles where large ones would leave more rows of the last one empty
            is_small = left <= small_rows or large_rows < left <= 2 * small_rows
            for n in range(first, stop, tile_outputs):
                place, target, last_output = panel + (n - first) * panel_bytes, out + 4 * n, stop - 1 - n
                if is_small:
                    small(x, x_bytes, left - 1, place, panel_bytes, last_output, num_blocks, target, out_bytes)
                else:
                    large(x, x_bytes, left - 1, place, panel_bytes, last_output, num_blocks, target, out_bytes)
            row += small_rows if is_small else large_rows

    def linear(args: int, thread: int) -> None:
        outputs, size = load_i64(args + NUM_OUTPUTS), load_i64(args + ITEM_OUTPUTS)
        inputs, row_bytes = load_i64(args + NUM_INPUTS), load_i64(args + ROW_BYTES)
        num_blocks = load_i64(args + NUM_BLOCKS)
        panel = load_i64(args + SCRATCH) + thread * load_i64(args + SCRATCH_BYTES)
        item = claim(args)
        while item >= 0:
            first, stop = item * size, min(outputs, (item + 1) * size)
            for n in range(first, stop):
                source = load_i64(args + WEIGHTS) + n * row_bytes
                expand_row(source, panel + 4 * (n - first) * inputs, num_blocks)
            apply_panel(args, panel, first, stop)
            item = claim(args)

    return linear


def make_embed_kernel(width: int, kind: StorageKind) -> KernelBody:
    """Return the kernel out[row] = weights[token_ids[row]]; an item is a row."""
    expand_row = make_expand_row(kind.parts, width)

    def embed(args: int, thread: int) -> None:
        item = claim(args)
        while item >= 0:
            token_id = load_i32(load_i64(args + X) + 4 * item)
            source = load_i64(args + WEIGHTS) + token_id * load_i64(args + ROW_BYTES)
            expand_row(source, load_i64(args + OUT) + item * load_i64(args + OUT_BYTES), load_i64(args + NUM_BLOCKS))
            item = claim(args)

    return embed
