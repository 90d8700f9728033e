"""Element types of the page pool and of tensors on the wire."""

from __future__ import annotations

from enum import StrEnum


class DType(StrEnum):
    """How one element of K, V or a tensor is stored."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"  # KV storage only, with a float32 scale per (token, KV head)
    FLOAT8_E4M3 = "float8_e4m3"  # KV storage only, with a float32 scale per (token, KV head)

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3": 1}[self.value]

    @property
    def is_quantized(self) -> bool:
        """Whether a stored element is only meaningful with its scale."""
        return self in (DType.INT8, DType.FLOAT8_E4M3)
