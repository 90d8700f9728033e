"""The kinds of stored weights that the kernels read, what becomes of others, and the check of a weight's size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from pagedkv.compute.backend import WeightData
from pagedkv.compute.cpu import quant_emit
from pagedkv.compute.cpu.dense_tiles import Parts
from pagedkv.compute.cpu.quant_emit import BLOCK_PART, PLAIN_PART, plain_part
from pagedkv.compute.cpu.simd_emit import KIND_BF16, KIND_BYTES, KIND_F16, KIND_F32
from pagedkv.compute.dequantize import dequantize, repack, repacked_kind
from pagedkv.errors import InvalidModelFile, UnsupportedModel


@dataclass(frozen=True, slots=True)
class StorageKind:
    """How a kind stores `block_weights` neighbouring weights in `block_bytes` bytes, and how kernels walk them."""

    name: str
    block_weights: int
    block_bytes: int
    parts: Parts

    @property
    def multiple(self) -> int:
        """Weights that a kernel's step covers: rows are padded to it."""
        return self.parts.parts * self.parts.part_weights

    def row_bytes(self, num_inputs: int) -> int:
        """Bytes of a row."""
        return num_inputs // self.block_weights * self.block_bytes


def stored_kind(kind: str) -> str:
    """Return the kind that kernels read instead: the same where they can, else one that holds exactly as much."""
    if kind in KINDS:
        return kind
    return repacked_kind(kind) or "F32"


def as_kernels_read(weight: WeightData) -> WeightData:
    """Return a weight that kernels read: itself where they can, else its copy in another kind, exact to the last bit.

    Raises UnsupportedModel for a kind that nothing turns into numbers.
    """
    kind = stored_kind(weight.kind)
    if kind == weight.kind:
        return weight
    if kind != "F32":
        return repack(weight)
    return WeightData("F32", weight.shape, dequantize(weight, np.float32).reshape(-1).view(np.uint8))


def check_weight(weight: WeightData) -> StorageKind:
    """Return the weight's kind. Raises UnsupportedModel for an unknown one, InvalidModelFile for a wrong size."""
    kind = KINDS.get(weight.kind)
    if kind is None:
        raise UnsupportedModel(
            f"tensor type {weight.kind} is not supported; supported: {', '.join(KINDS)}", tensor_type=weight.kind
        )
    num_rows = int(np.prod(weight.shape[:-1], dtype=np.int64))
    num_bytes = num_rows * kind.row_bytes(weight.shape[-1])
    if weight.shape[-1] % kind.block_weights or weight.data.nbytes != num_bytes:
        raise InvalidModelFile(
            f"a {weight.kind} tensor of shape {weight.shape} has {weight.data.nbytes} bytes, {num_bytes} are needed",
            num_bytes=weight.data.nbytes,
            needed=num_bytes,
        )
    return kind


def _plain(name: str, stored: int) -> StorageKind:
    size = KIND_BYTES[stored]
    return StorageKind(name, 1, size, Parts(plain_part(stored), PLAIN_PART * size, 1, PLAIN_PART))


def _blocks(name: str, block_weights: int, block_bytes: int, emit: quant_emit.EmitPart) -> StorageKind:
    parts = Parts(emit, block_bytes, block_weights // BLOCK_PART, BLOCK_PART)
    return StorageKind(name, block_weights, block_bytes, parts)


KINDS: Final = {
    kind.name: kind
    for kind in (
        _plain("F32", KIND_F32),
        _plain("F16", KIND_F16),
        _plain("BF16", KIND_BF16),
        _blocks("Q4_0", 32, 18, quant_emit.q4_0_part),
        _blocks("Q4_1", 32, 20, quant_emit.q4_1_part),
        _blocks("Q8_0", 32, 34, quant_emit.q8_0_part),
        _blocks("Q4_K", 256, 144, quant_emit.q4_k_part),
        _blocks("Q5_K", 256, 176, quant_emit.q5_k_part),
        _blocks("Q6_K", 256, 210, quant_emit.q6_k_part),
    )
}
