"""Frozen, validated configuration values."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.dtypes import DType
from pagedkv.errors import InvalidArgument

BLOCK_SIZES = (8, 16, 32, 64, 128)
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
PREEMPTION_MODES = ("recompute", "swap")
ACTIVATIONS = ("float32", "int16", "int8")  # what linear layers on the CPU may round their inputs to

MAX_SALT_BYTES = 1_024  # of a tenant's salt


def require(condition: bool, field: str, message: str, value: object, limit: object = None) -> None:
    """Raise InvalidArgument naming `field`, `value` and `limit` unless `condition` holds."""
    if not condition:
        raise InvalidArgument(f"{message}, got {value!r}", field=field, value=value, limit=limit)


def check_length(field: str, value: str | bytes, limit: int) -> None:
    """Refuse a text or bytes of more than `limit` characters or bytes, without showing it."""
    unit = "characters" if isinstance(value, str) else "bytes"
    require(len(value) <= limit, field, f"must be at most {limit} {unit}", len(value), limit)


def check_count(field: str, count: int, limit: int) -> None:
    """Refuse more than `limit` entries."""
    require(count <= limit, field, f"must hold at most {limit}", count, limit)


@dataclass(frozen=True, slots=True)
class KvShape:
    """Geometry of the keys and values that a pool holds."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: DType = DType.FLOAT32

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_heads", "num_kv_heads"):
            require(getattr(self, field) >= 1, field, "must be at least 1", getattr(self, field), 1)
        require(self.head_dim in HEAD_DIMS, "head_dim", f"must be one of {HEAD_DIMS}", self.head_dim, HEAD_DIMS)
        require(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            f"must divide num_heads ({self.num_heads})",
            self.num_kv_heads,
            self.num_heads,
        )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Size and policy of the control plane.

    `hash_root` seeds the prefix hash chain; None draws a random one, so that digests of two processes never match.
    `max_sequence_tokens` is the longest sequence; None means the whole pool. `num_host_blocks` are there to swap to.
    """

    num_blocks: int
    block_size: int = 16
    num_layers: int = 1
    max_sequence_tokens: int | None = None
    prefix_caching: bool = True
    hash_root: bytes | None = None
    num_host_blocks: int = 0

    def __post_init__(self) -> None:
        require(self.num_blocks >= 1, "num_blocks", "must be at least 1", self.num_blocks, 1)
        require(self.num_blocks < 2**31, "num_blocks", "must fit a 32-bit block id", self.num_blocks, 2**31 - 1)
        require(self.block_size >= 1, "block_size", "must be at least 1", self.block_size, 1)
        require(self.num_layers >= 1, "num_layers", "must be at least 1", self.num_layers, 1)
        hosts = self.num_host_blocks
        require(0 <= hosts < 2**31, "num_host_blocks", "must be in [0, 2^31)", hosts, 2**31 - 1)
        limit = self.max_sequence_tokens
        require(limit is None or limit >= 1, "max_sequence_tokens", "must be at least 1", limit, 1)

    @property
    def sequence_limit(self) -> int:
        """Most tokens one sequence may hold."""
        pool = self.num_blocks * self.block_size
        return pool if self.max_sequence_tokens is None else min(pool, self.max_sequence_tokens)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of the generation engine.

    `max_batch_tokens` bounds the tokens computed in one step; longer prompts are computed in chunks over several
    steps, between which running requests keep decoding. `max_model_len` None means the model's own context length.
    `preemption` says what becomes of a request whose blocks are taken: "recompute" computes its tokens again, "swap"
    keeps its blocks in the host pool and recomputes only where that is full.
    """

    max_num_seqs: int = 64
    max_batch_tokens: int = 512
    max_waiting: int = 1024
    max_model_len: int | None = None
    preemption: str = "recompute"

    def __post_init__(self) -> None:
        for field in ("max_num_seqs", "max_batch_tokens", "max_waiting"):
            require(getattr(self, field) >= 1, field, "must be at least 1", getattr(self, field), 1)
        limit = self.max_model_len
        require(limit is None or limit >= 2, "max_model_len", "must be at least 2", limit, 2)
        known = self.preemption in PREEMPTION_MODES
        require(known, "preemption", f"must be one of {PREEMPTION_MODES}", self.preemption)
        require(
            self.max_batch_tokens >= self.max_num_seqs,
            "max_batch_tokens",
            f"must be at least max_num_seqs ({self.max_num_seqs}), or running requests could not all decode",
            self.max_batch_tokens,
            self.max_num_seqs,
        )
