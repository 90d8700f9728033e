"""Stored weights for tests, and what they stand for."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np

from pagedkv.compute.backend import WeightData

KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
PLAIN_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
CONVERTED = ("Q5_0", "Q5_1", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
CONVERTED += ("IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0", "MXFP4")
# Where the float16 scales of a block lie.
_SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,), "TQ1_0": (52,)}
_SCALES |= {"TQ2_0": (64,), "MXFP4": ()} | {kind: (0,) for kind in CONVERTED if kind.startswith("IQ")}


def make_weight(kind: str, num_outputs: int, num_inputs: int, seed: int = 0) -> tuple[WeightData, np.ndarray]:
    """Return a stored matrix of random weights and its values as float64, by gguf's dequantiser."""
    rng = np.random.default_rng(seed)
    shape = (num_outputs, num_inputs)
    values = rng.standard_normal(shape).astype(np.float32)
    if kind in PLAIN_TYPES:
        stored = values.astype(PLAIN_TYPES[kind])
        return WeightData(kind, shape, stored.view(np.uint8).reshape(-1)), stored.astype(np.float64)
    quantization = gguf.GGMLQuantizationType[kind]
    if kind in _SCALES:
        data = _random_blocks(kind, num_outputs, num_inputs, rng)
    else:
        data = gguf.quants.quantize(values, quantization)
    return WeightData(kind, shape, data.reshape(-1)), gguf.quants.dequantize(data, quantization).astype(np.float64)


def _random_blocks(kind: str, num_outputs: int, num_inputs: int, rng: np.random.Generator) -> np.ndarray:
    """Return random bytes with sane scales: every bit pattern of a block is a legal one."""
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (num_outputs, num_inputs // weights, size), dtype=np.uint8)
    if kind == "IQ1_M":  # four bits of its scale lie in each of the last four words
        blocks[:, :, [49, 51, 53]] &= 0x0F
        blocks[:, :, 55] = 0x20 | blocks[:, :, 55] & 0x0F
    elif kind == "MXFP4":  # the first byte is an exponent
        blocks[:, :, 0] = rng.integers(118, 126, blocks.shape[:2])
    else:
        for place in _SCALES[kind]:
            halves = rng.uniform(-0.02, 0.02, blocks.shape[:2]).astype(np.float16)
            blocks[:, :, place : place + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(num_outputs, -1)
