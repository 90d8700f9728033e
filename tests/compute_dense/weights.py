"""Stored weights for tests, and what they stand for."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np

from pagedkv.compute.backend import WeightData

KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
PLAIN_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_BLOCKS = {"Q4_K": (256, 144, (0, 2)), "Q6_K": (256, 210, (208,))}  # weights, bytes, places of float16 scales


def make_weight(kind: str, num_outputs: int, num_inputs: int, seed: int = 0) -> tuple[WeightData, np.ndarray]:
    """Return a stored matrix of random weights and its values as float64, by gguf's dequantiser."""
    rng = np.random.default_rng(seed)
    shape = (num_outputs, num_inputs)
    values = rng.standard_normal(shape).astype(np.float32)
    if kind in PLAIN_TYPES:
        stored = values.astype(PLAIN_TYPES[kind])
        return WeightData(kind, shape, stored.view(np.uint8).reshape(-1)), stored.astype(np.float64)
    quantization = gguf.GGMLQuantizationType[kind]
    if kind in _BLOCKS:
        data = _random_blocks(kind, num_outputs, num_inputs, rng)
    else:
        data = gguf.quants.quantize(values, quantization)
    return WeightData(kind, shape, data.reshape(-1)), gguf.quants.dequantize(data, quantization).astype(np.float64)


def _random_blocks(kind: str, num_outputs: int, num_inputs: int, rng: np.random.Generator) -> np.ndarray:
    """Return random bytes with sane scales: every bit pattern of a block is a legal one."""
    weights, size, scales = _BLOCKS[kind]
    blocks = rng.integers(0, 256, (num_outputs, num_inputs // weights, size), dtype=np.uint8)
    for place in scales:
        halves = rng.uniform(-0.02, 0.02, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, place : place + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(num_outputs, -1)
