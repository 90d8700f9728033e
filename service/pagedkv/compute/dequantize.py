"""Stored weights that no kernel reads as they are, turned into ones that kernels read.

The formulas are the `gguf` package's. They run over some rows at a time, so that besides the result and the stored
bytes a conversion needs at most `_CHUNK_WEIGHTS` times some 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagedkv.compute.backend import WeightData
from pagedkv.errors import InvalidModelFile, UnsupportedModel

_CHUNK_WEIGHTS: Final = 1 << 22

Blocks = npt.NDArray[np.uint8]  # [num_blocks, block_bytes]


def dequantize(weight: WeightData, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a weight of a GGML block type as an array of a float type, in its shape.

    Raises UnsupportedModel for a kind that the gguf package does not turn into numbers, InvalidModelFile for a wrong
    size.
    """
    values = np.empty(weight.shape, dtype)
    rows = values.reshape(-1, weight.shape[-1])
    with np.errstate(all="ignore"):  # what a damaged scale gives is the file's own affair
        for first, chunk in _chunks(weight):
            rows[first : first + len(chunk)] = _formula(weight.kind, chunk)
    return values


def repacked_kind(kind: str) -> str | None:
    """Return the kind that holds exactly the same weights in other places, None where there is none."""
    return _REPACKED[kind][0] if kind in _REPACKED else None


def repack(weight: WeightData) -> WeightData:
    """Return the same weights, exactly, as the kind that `repacked_kind` names."""
    target, repack_blocks = _REPACKED[weight.kind]
    block_weights, block_bytes = _block_size(target)
    num_rows, num_inputs = math.prod(weight.shape[:-1]), weight.shape[-1]
    data = np.empty((num_rows, num_inputs // block_weights * block_bytes), np.uint8)
    for first, chunk in _chunks(weight):
        blocks = chunk.reshape(-1, _block_size(weight.kind)[1])
        data[first : first + len(chunk)] = repack_blocks(blocks).reshape(len(chunk), -1)
    return WeightData(target, weight.shape, data.reshape(-1))


def _q8_0_of_scaled_codes(kind: str, blocks: Blocks) -> Blocks:
    """Repack 32 weights that are a float16 scale, in the first two bytes, times whole numbers of eight bits."""
    codes = blocks.copy()
    codes[:, :2] = _ONE
    return np.hstack([blocks[:, :2], _whole(kind, codes).view(np.uint8)])


def _q6_k_of_q3_k(blocks: Blocks) -> Blocks:
    """Repack scale * s * q: s of six bits becomes one of eight, q of three bits one of six.

    Each is read off by the formula itself, with 1 in the place of the others.
    """
    codes, smalls = blocks.copy(), blocks.copy()
    codes[:, 96:104], codes[:, 104:108], codes[:, 108:] = 0x11, 0xAA, _ONE  # every s is 1
    smalls[:, :32], smalls[:, 32:96], smalls[:, 108:] = 0xFF, 0x55, _ONE  # every q is 1
    # Q6_K's order: two halves of four runs of 32; low bits of runs 0 and 2, 1 and 3 share bytes, high bits of all four.
    runs = (_whole("Q3_K", codes) + 32).view(np.uint8).reshape(-1, 2, 4, 32)
    low = (runs[:, :, :2] & 15) | (runs[:, :, 2:] << 4)
    high = np.bitwise_or.reduce((runs >> 4) << (2 * np.arange(4, dtype=np.uint8))[:, None], axis=2)
    small = _whole("Q3_K", smalls)[:, ::16].view(np.uint8)
    return np.hstack([low.reshape(-1, 128), high.reshape(-1, 64), small, blocks[:, 108:]])


_ONE: Final = np.ones(1, "<f2").view(np.uint8)
_REPACKED: Final[dict[str, tuple[str, Callable[[Blocks], Blocks]]]] = {
    "Q5_0": ("Q8_0", partial(_q8_0_of_scaled_codes, "Q5_0")),
    "IQ4_NL": ("Q8_0", partial(_q8_0_of_scaled_codes, "IQ4_NL")),
    "Q3_K": ("Q6_K", _q6_k_of_q3_k),
}


def _whole(kind: str, blocks: Blocks) -> npt.NDArray[np.int8]:
    return _formula(kind, blocks).astype(np.int8)


def _formula(kind: str, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    import gguf  # slow to import, and most models need none of it

    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])


def _chunks(weight: WeightData) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Give the index of the first row and the bytes of some rows."""
    block_weights, block_bytes = _block_size(weight.kind)
    num_rows, num_inputs = math.prod(weight.shape[:-1]), weight.shape[-1]
    needed = num_rows * (num_inputs // block_weights) * block_bytes
    if num_inputs % block_weights or weight.data.nbytes != needed:
        raise InvalidModelFile(
            f"a {weight.kind} tensor of shape {weight.shape} has {weight.data.nbytes} bytes, {needed} are needed",
            num_bytes=weight.data.nbytes,
            needed=needed,
        )
    rows = np.ascontiguousarray(weight.data).reshape(num_rows, -1)
    step = max(1, _CHUNK_WEIGHTS // num_inputs)
    for first in range(0, len(rows), step):
        yield first, rows[first : first + step]


def _block_size(kind: str) -> tuple[int, int]:
    """Return the weights and the bytes of a block. Raises UnsupportedModel for what has no formula."""
    import gguf

    found = gguf.GGMLQuantizationType.__members__.get(kind)
    if found is None or found not in gguf.quants._type_traits:
        raise UnsupportedModel(f"weights of kind {kind} are not supported: nothing turns them into numbers", kind=kind)
    block_weights, block_bytes = gguf.GGML_QUANT_SIZES[found]
    return block_weights, block_bytes
