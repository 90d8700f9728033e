"""The argument words of the attention kernel: byte offsets into an int64 array, and of one work item's record."""

from __future__ import annotations

from typing import Final

# Words 0 and 1 are the next item and the number of items (see threads.claim).
POOL: Final = 16  # address of (block 0, this layer)
QUERIES: Final = 24
QUERY_KIND: Final = 32  # KIND_F32, KIND_F16 or KIND_BF16
OUTPUT: Final = 40
LSE: Final = 48
ITEMS: Final = 56
NUM_KV_HEADS: Final = 64
GROUP_SIZE: Final = 72
HEAD_DIM: Final = 80
BLOCK_SHIFT: Final = 88  # log2 of the block size
BLOCK_BYTES: Final = 96  # strides of the pool, in bytes
VALUE_BYTES: Final = 104
HEAD_BYTES: Final = 112
SCALE_BYTES: Final = 120  # from the start of a (block, layer) to its scales
WINDOW: Final = 128
SCORE_SCALE: Final = 136  # float64; queries are multiplied by it
SOFT_CAP: Final = 144  # float64 in units of log2; 0 switches it off
SLOPES: Final = 152  # address of float32 [num_heads] in units of log2, or 0
SINKS: Final = 160  # address of float32 [num_heads] in units of log2, or 0
CHUNK_TOKENS: Final = 168
MAX_ROWS: Final = 176
SCRATCH: Final = 184
SCRATCH_BYTES: Final = 192  # a thread
PARTIALS: Final = 200
COUNTERS: Final = 208  # int64 [num_split_units, num_kv_heads]: parts still to come
NUM_CLAIMED_EARLY: Final = 216  # first items, whose successor a thread claims before it begins them
NUM_WORDS: Final = 28

# One record of int64 words a unit; item i is KV head i % num_kv_heads of unit i // num_kv_heads.
ITEM_FIRST_QUERY: Final = 0
ITEM_NUM_QUERIES: Final = 8
ITEM_POSITION: Final = 16  # of the first query
ITEM_FIRST_TOKEN: Final = 24  # a multiple of the block size
ITEM_STOP_TOKEN: Final = 32
ITEM_TABLE: Final = 40  # address of the sequence's int32 block table
ITEM_PART: Final = 48  # number of this part, -1 if the unit is not split
ITEM_FIRST_PARTIAL: Final = 56  # queries with partial results before this unit's, each counted once a part
ITEM_NUM_PARTS: Final = 64
ITEM_COUNTER: Final = 72
ITEM_WORDS: Final = 10
