"""What the client's calls take and return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from pagedkv.dtypes import DType

Array: TypeAlias = Any  # NumPy's, PyTorch's, or anything with __dlpack__, __array__ or __array_interface__


class AttendOptions(TypedDict, total=False):
    """Options of an attend call; each may also be None, which is as if it were not given."""

    query_lens: Sequence[int] | Array | None
    keys: Array | None
    values: Array | None
    positions: Sequence[int] | Array | None
    token_ids: Sequence[int] | Array | None
    scale: float | None
    window: int | None
    soft_cap: float | None
    alibi_slopes: Sequence[float] | Array | None
    sinks: Sequence[float] | Array | None


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """Geometry of the server's pool."""

    num_blocks: int
    block_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: DType
    backend: str
    max_sequence_tokens: int
    block_bytes: int
    num_host_blocks: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """A new sequence; its first `num_cached_tokens` tokens need no K and V."""

    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Attention:
    """`output` float32 like the queries, `lse` float32 [num_queries, num_heads], seconds on the device."""

    output: npt.NDArray[np.float32]
    lse: npt.NDArray[np.float32]
    compute_seconds: float


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """A sequence as it is now; its tables and `layer_lengths` are empty in a list of sequences.

    One that is swapped out has a host block table in place of its block table.
    """

    sequence_id: str
    num_tokens: int
    layer_lengths: tuple[int, ...]
    block_table: tuple[int, ...]
    num_cached_tokens: int
    is_swapped: bool
    host_block_table: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Swap:
    """What a swap copied; `num_kept_blocks` needed no copy, as they were on the other side already."""

    num_blocks: int
    num_bytes: int
    num_kept_blocks: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Blocks by state, which sum to `total`, and the tokens that live sequences hold, shared ones once.

    Swapped sequences hold host blocks only, whose three states sum to `host_total`.
    """

    free: int
    cached: int
    private: int
    shared: int
    pinned: int
    in_flight: int
    total: int
    num_tokens: int
    host_free: int
    host_private: int
    host_shared: int
    host_total: int
    num_swapped: int
    swapped_tokens: int


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit found."""

    ok: bool
    findings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """New text of a generation; `finish_reason` is set on the last chunk only.

    It is "stop", "length" or "cancelled", and "other" where a newer server gives a reason that is not known here.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model."""

    architecture: str
    vocab_size: int
    max_tokens: int
    eos_token_ids: tuple[int, ...]
