"""How a batch of attention is launched: which kernel serves which sequences, in how many tiles and partitions.

Sequences with few rows of queries (decoding) and with many (prompts) go to different kernels, so a mixed batch is two
launches: no decoding row waits in a tile made for a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.compute.backend import AttentionBatch
from pagedkv.compute.cuda.kernels import DECODE_ROWS, Variant

MAX_PARTITIONS = 128
KEY_GRAIN = 64  # a part is a multiple of a tile's keys
FIXED_KEYS = 64  # what begin and end of a CTA cost, in keys

Integers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Share:
    """The sequences of a batch that one launch serves; the others have a length of 0 here."""

    variant: Variant
    query_lens: Integers  # [num_sequences]
    longest: int  # keys that a tile can see, at most

    @property
    def num_queries(self) -> int:
        """Queries of the share."""
        return int(self.query_lens.sum())

    @property
    def starts(self) -> npt.NDArray[np.int32]:
        """Where each sequence's queries begin among the share's own [num_sequences]."""
        return (np.cumsum(self.query_lens) - self.query_lens).astype(np.int32)

    def rows(self, query_lens: Integers) -> npt.NDArray[np.int32]:
        """Return where the share's queries lie among all of the batch [num_queries]."""
        return np.flatnonzero(np.repeat(self.query_lens > 0, query_lens)).astype(np.int32)


def divide(
    batch: AttentionBatch, group_size: int, window: int | None, choose: Callable[[int], Variant], capacity: int | None
) -> list[Share]:
    """Return a batch's shares, one or two. `choose` gives the variant for a largest number of rows.

    `capacity` stands for every context length where that may change later, in a recorded step.
    """
    lens = np.diff(batch.query_starts)
    is_small = lens * group_size <= DECODE_ROWS
    parts = [part for part in (np.where(is_small, lens, 0), np.where(is_small, 0, lens)) if part.any()]
    variants = [choose(int(part.max()) * group_size) for part in parts]
    if len(set(variants)) == 1:
        parts = [lens]
    return [
        Share(variant, part, _longest(batch.context_lens[part > 0], part, group_size, window, variant, capacity))
        for variant, part in zip(variants, parts, strict=False)
    ]


def _longest(
    contexts: Integers,
    query_lens: Integers,
    group_size: int,
    window: int | None,
    variant: Variant,
    capacity: int | None,
) -> int:
    longest = int(contexts.max()) if capacity is None else capacity
    if window is None:
        return longest
    positions = -(-(variant.rows - 1) // group_size) + 1  # that the rows of a tile can spread over
    return min(longest, window - 1 + min(int(query_lens.max()), positions))


def choose_partitions(num_items: int, slots: int, num_keys: int, min_partition: int) -> int:
    """Return into how many parts `num_items` of `num_keys` keys are divided, that `slots` of them run at a time.

    The one with the least time: as many rounds as fill the slots, times the keys of a part.
    """
    most = max(1, min(-(-num_keys // min_partition), MAX_PARTITIONS))

    def time(parts: int) -> int:
        length = max(min_partition, -(-num_keys // parts))
        return -(-num_items * parts // slots) * (-(-length // KEY_GRAIN) * KEY_GRAIN + FIXED_KEYS)

    return min(range(1, most + 1), key=time)


def make_tiles(query_lens: Integers, group_size: int, rows: int) -> npt.NDArray[np.int32]:
    """Return [num_tiles, 2]: the sequence of each query tile and the tile's number in it, the last one first.

    A later tile sees more keys; the short ones, started last, fill up the device's end.
    """
    counts = -(-query_lens.astype(np.int64) * group_size // rows)
    sequences = np.repeat(np.arange(len(counts)), counts)
    numbers = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(sequences))
    return np.stack([sequences, numbers], axis=1).astype(np.int32)
