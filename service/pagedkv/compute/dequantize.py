"""Stored weights that no kernel reads as they are, turned into ones that kernels read.

Numbers come from the `gguf` package; the layouts of blocks are described in ggml-quants.h of llama.cpp. A conversion
goes over some rows at a time, so that besides the stored bytes and the result it needs at most `_CHUNK_WEIGHTS` times
some 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagedkv.compute.backend import WeightData
from pagedkv.errors import InvalidModelFile, UnsupportedModel

_CHUNK_WEIGHTS: Final = 1 << 20

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


def _q8_0_of_q5_0(blocks: Blocks) -> Blocks:
    """Repack scale * (q - 16): float16 scale, 32 fifth bits of q, then 16 bytes with the low four as in Q4_0."""
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    return np.hstack([blocks[:, :2], (_nibbles(blocks[:, 6:]) | (fifth << 4)) - 16])


def _q8_0_of_iq4_nl(blocks: Blocks) -> Blocks:
    """Repack scale * table[q]: float16 scale, 16 bytes as in Q4_0."""
    return np.hstack([blocks[:, :2], _IQ4_NL_TABLE[_nibbles(blocks[:, 2:])]])


def _q6_k_of_q3_k(blocks: Blocks) -> Blocks:
    """Repack scale * s * q: s of six bits becomes one of eight, q of three bits one of six.

    256 weights are eight runs of 32. Q3_K: 32 bytes whose bit i is set where run i has no -4, 64 bytes with the low two
    bits of four runs each, 12 bytes with sixteen s + 32, a float16 scale. Q6_K: see quant_emit.
    """
    high = (blocks[:, None, :32] >> _RUNS) & 1
    low = (blocks[:, 32:96].reshape(-1, 2, 1, 32) >> _PAIRS) & 3
    codes = (low.reshape(-1, 8, 32) + (high << 2) + 28).reshape(-1, 2, 4, 32)  # q + 32
    bottom = (codes[:, :, :2] & 15) | (codes[:, :, 2:] << 4)
    top = np.bitwise_or.reduce((codes >> 4) << _PAIRS, axis=2)
    scales = _nibbles(blocks[:, 96:104]) | (((blocks[:, None, 104:108] >> _PAIRS) & 3).reshape(-1, 16) << 4)
    return np.hstack([bottom.reshape(-1, 128), top.reshape(-1, 64), scales - 32, blocks[:, 108:]])


def _nibbles(packed: Blocks) -> Blocks:
    """Return the low halves of all bytes, then their high halves."""
    return np.hstack([packed & 15, packed >> 4])


# Bytes hold signed numbers too: a difference below 0 wraps to the same bits.
_IQ4_NL_TABLE: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
).view(np.uint8)
_RUNS: Final = np.arange(8, dtype=np.uint8)[:, None]
_PAIRS: Final = np.arange(0, 8, 2, dtype=np.uint8)[:, None]  # shifts to the two bits of each of four runs
_REPACKED: Final[dict[str, tuple[str, Callable[[Blocks], Blocks]]]] = {
    "Q5_0": ("Q8_0", _q8_0_of_q5_0),
    "IQ4_NL": ("Q8_0", _q8_0_of_iq4_nl),
    "Q3_K": ("Q6_K", _q6_k_of_q3_k),
}


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
