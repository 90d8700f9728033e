"""A sequence of tokens and its block table, and the values that callers exchange with the manager about it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

from pagedkv.cache.block_hash import PrefixExtras


@dataclass(frozen=True, slots=True)
class Allocation:
    """A new sequence; its first `num_cached_tokens` tokens were found in the prefix cache and need no computing."""

    sequence_id: str
    num_cached_tokens: int


class ReserveRequest(NamedTuple):
    """One item of reserve_batch. Named tuples, here and below, cost a third of a frozen dataclass to make."""

    sequence_id: str
    num_tokens: int
    layer: int | None = None
    token_ids: SequenceOf[int] | None = None


class Reservation(NamedTuple):
    """Slots for the tokens [start, start + num_tokens), to be written and then committed, or cancelled.

    Position p has slot `table[p // block_size] * block_size + p % block_size`. `copies` are the (source,
    destination) block copies over all layers that must run before anything is written.
    """

    sequence_id: str
    layer: int | None
    start: int
    num_tokens: int
    copies: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SequenceView:
    """A sequence at one moment. `num_tokens` are committed in all layers; times are the cache clock's seconds.

    `host_table` is None but for a swapped sequence: it lists the host blocks, and `block_table` is empty.
    """

    sequence_id: str
    num_tokens: int
    layer_lengths: tuple[int, ...]
    block_table: tuple[int, ...]
    num_cached_tokens: int
    num_known_tokens: int  # leading tokens whose ids the cache was told
    created_at: float
    touched_at: float
    host_table: tuple[int, ...] | None = None

    @property
    def is_swapped(self) -> bool:
        """Whether the sequence lies in host memory."""
        return self.host_table is not None


class Sequence:
    """The manager's own record of a sequence; only the manager changes it."""

    __slots__ = (
        "chain_root",
        "charge",
        "created_at",
        "extras",
        "host_table",
        "is_hashable",
        "layer_lengths",
        "length",
        "num_cached_tokens",
        "num_fresh",
        "num_known_before",
        "num_published",
        "open",
        "pow2",
        "sequence_id",
        "table",
        "token_ids",
        "touched_at",
        "uncounted",
    )

    def __init__(self, sequence_id: str, extras: PrefixExtras, chain_root: bytes, now: float) -> None:
        self.sequence_id = sequence_id
        self.extras = extras
        self.chain_root = chain_root
        self.table: array[int] = array("i")
        self.host_table: array[int] | None = None  # host blocks while swapped out; the table is empty then
        self.length = 0  # committed in all layers
        self.layer_lengths: list[int] | None = None  # None while all layers have `length`
        self.token_ids: array[int] = array("i")  # of the leading positions; may reach beyond what is written
        self.num_published = 0  # leading blocks that the index knows
        self.is_hashable = True  # False when caching is off or a digest collided: later blocks are never published
        self.num_cached_tokens = 0
        self.uncounted: tuple[int, int, bool] | None = None  # queried tokens, hit tokens, whether a recompute
        self.charge = 0  # tokens that it began with: known ids, or all of its parent's
        self.open: Reservation | None = None
        self.num_fresh = 0  # blocks that the open reservation appended to the table
        self.num_known_before = 0  # len(token_ids) before the open reservation
        self.pow2 = 0  # smallest power of two that holds `length`
        self.created_at = now
        self.touched_at = now

    def layer_length(self, layer: int | None) -> int:
        """Return the tokens written in `layer`, or in all layers."""
        return self.length if layer is None or self.layer_lengths is None else self.layer_lengths[layer]

    @property
    def written(self) -> int:
        """Tokens written in at least one layer."""
        return self.length if self.layer_lengths is None else max(self.layer_lengths)

    @property
    def claimed(self) -> int:
        """Tokens written in at least one layer or reserved."""
        return self.written if self.open is None else max(self.written, self.open.start + self.open.num_tokens)

    def copy(self) -> Sequence:
        """Return a record with the same state, to be looked at while this one changes."""
        twin = copy(self)
        twin.table, twin.token_ids = self.table[:], self.token_ids[:]
        twin.host_table = None if self.host_table is None else self.host_table[:]
        twin.layer_lengths = None if self.layer_lengths is None else self.layer_lengths[:]
        return twin

    def view(self, num_layers: int) -> SequenceView:
        """Return a frozen copy."""
        return replace(
            self.summary(),
            layer_lengths=tuple(self.layer_lengths or [self.length] * num_layers),
            block_table=tuple(self.table),
            host_table=None if self.host_table is None else tuple(self.host_table),
        )

    def summary(self) -> SequenceView:
        """Return a frozen copy without tables and layer lengths, however long they are."""
        return SequenceView(
            sequence_id=self.sequence_id,
            num_tokens=self.length,
            layer_lengths=(),
            block_table=(),
            num_cached_tokens=self.num_cached_tokens,
            num_known_tokens=len(self.token_ids),
            created_at=self.created_at,
            touched_at=self.touched_at,
            host_table=None if self.host_table is None else (),
        )
