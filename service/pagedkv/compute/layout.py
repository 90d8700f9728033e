"""Where each key and value lies in the page pool.

pool[block_id][layer][K=0|V=1][kv_head][offset][head_dim]

One block is one contiguous run over all layers, so a copy-on-write, a swap or a transfer is one copy. A
(block, layer, K|V, KV head) tile of [block_size, head_dim] is contiguous too. Quantised pools append to each
(block, layer) a float32 scale per (K|V, kv_head, offset), behind the elements of that layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.config import BLOCK_SIZES, KvShape, require

_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Strides of the pool, in elements of `shape.dtype` unless the name says bytes. All products are Python ints."""

    shape: KvShape
    num_blocks: int
    block_size: int

    def __post_init__(self) -> None:
        require(self.num_blocks >= 1, "num_blocks", "must be at least 1", self.num_blocks, 1)
        require(
            self.block_size in BLOCK_SIZES,
            "block_size",
            f"must be one of {BLOCK_SIZES}",
            self.block_size,
            BLOCK_SIZES,
        )

    @property
    def head_stride(self) -> int:
        """From one KV head's tile to the next."""
        return self.block_size * self.shape.head_dim

    @property
    def value_stride(self) -> int:
        """From a layer's K to its V."""
        return self.shape.num_kv_heads * self.head_stride

    @property
    def scale_offset(self) -> int:
        """From the start of a (block, layer) to its scales; meaningful for quantised dtypes only."""
        return 2 * self.value_stride

    @property
    def layer_stride(self) -> int:
        """From one layer of a block to the next."""
        scales = 2 * self.shape.num_kv_heads * self.block_size * _SCALE_BYTES if self.shape.dtype.is_quantized else 0
        return 2 * self.value_stride + scales // self.shape.dtype.itemsize

    @property
    def block_stride(self) -> int:
        """From one block to the next."""
        return self.shape.num_layers * self.layer_stride

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.block_stride * self.shape.dtype.itemsize

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_blocks * self.block_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes over all layers."""
        return self.block_bytes // self.block_size

    def element_offset(self, block_id: int, layer: int, is_value: bool, kv_head: int, offset: int) -> int:
        """Return the pool index of element 0 of one head's row."""
        return (
            block_id * self.block_stride
            + layer * self.layer_stride
            + is_value * self.value_stride
            + kv_head * self.head_stride
            + offset * self.shape.head_dim
        )
