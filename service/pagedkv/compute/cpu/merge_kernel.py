"""The kernel that merges partial attention results: one row, a (query, head), is one work item."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from pagedkv.compute.cpu.simd import fma, load, load_f32, load_i64, splat, store, store_f32
from pagedkv.compute.cpu.threads import claim

# Argument words; 0 and 1 are the next item and the number of items (see threads.claim).
PARTS: Final = 16  # float32 [num_parts, num_rows, head_dim]
PART_LSES: Final = 24  # float32 [num_parts, num_rows]
OUTPUT: Final = 32
LSE: Final = 40
NUM_PARTS: Final = 48
HEAD_DIM: Final = 56
NUM_WORDS: Final = 8

_NO_SCORE: Final = -math.inf
_ZERO: Final = np.float32(0.0)


def make_merge_kernel(width: int) -> Callable[[int, int], None]:
    """Return the kernel for vectors of `width` float32. An empty part (lse -inf) is not read."""

    def merge_items(args: int, thread: int) -> None:
        num_rows, num_parts, head_dim = load_i64(args + 8), load_i64(args + NUM_PARTS), load_i64(args + HEAD_DIM)
        row = claim(args)
        while row >= 0:
            lses = load_i64(args + PART_LSES) + 4 * row
            output = load_i64(args + OUTPUT) + 4 * row * head_dim
            peak = _NO_SCORE
            for part in range(num_parts):
                peak = max(peak, float(load_f32(lses + 4 * part * num_rows)))
            total = 0.0
            if peak > _NO_SCORE:
                for part in range(num_parts):
                    total += math.exp(float(load_f32(lses + 4 * part * num_rows)) - peak)
            for dim in range(0, head_dim, width):
                merged = splat(_ZERO, width)
                for part in range(num_parts):
                    lse = float(load_f32(lses + 4 * part * num_rows))
                    if lse > _NO_SCORE:
                        weight = splat(np.float32(math.exp(lse - peak) / total), width)
                        place = load_i64(args + PARTS) + 4 * ((part * num_rows + row) * head_dim + dim)
                        merged = fma(weight, load(place, width), merged)
                store(output + 4 * dim, merged)
            result = np.float32(peak + math.log(total)) if total > 0.0 else np.float32(_NO_SCORE)
            store_f32(load_i64(args + LSE) + 4 * row, result)
            row = claim(args)

    return merge_items
