"""Random rows for calls over the wire, and the comparison of what comes back with the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np

from helpers.oracle import oracle_attention
from helpers.server import SHAPE
from pagedkv.client.tensors import to_tensor
from pagedkv.v1 import kv_cache_pb2

_OF_REQUEST = {"query_lens", "positions", "token_ids"}


def make_rows(num_tokens: int, seed: int = 0, *, num_layers: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return K and V [num_tokens, ...], or [num_layers, num_tokens, ...]."""
    rng = np.random.default_rng(seed)
    shape = (num_tokens, SHAPE.num_kv_heads, SHAPE.head_dim)
    full = shape if num_layers is None else (num_layers, *shape)
    return rng.standard_normal(full).astype(np.float32), rng.standard_normal(full).astype(np.float32)


def make_queries(num_queries: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed + 1_000)
    return rng.standard_normal((num_queries, SHAPE.num_heads, SHAPE.head_dim)).astype(np.float32)


def make_attend_message(
    sequence_ids: list[str], queries: np.ndarray, *, layer: int, **options: Any
) -> kv_cache_pb2.AttendRequest:
    """Return the message of an attend call as any client could send it: nothing is checked."""
    names = {"query_lens": "query_lengths"}
    of_request = {names.get(name, name): options.pop(name) for name in _OF_REQUEST & set(options)}
    tensors = {name: to_tensor(options.pop(name), name) for name in ("keys", "values") if name in options}
    return kv_cache_pb2.AttendRequest(
        sequence_ids=sequence_ids,
        queries=to_tensor(queries, "queries"),
        layer=layer,
        options=kv_cache_pb2.AttentionOptions(**options),
        **of_request,
        **tensors,
    )


def assert_attention(result: Any, queries: np.ndarray, keys: list, values: list, query_lens: list, **options: Any):
    """Compare an answer with the oracle over dense keys and values."""
    expected = oracle_attention(queries, keys, values, query_lens, **options)
    np.testing.assert_allclose(result.output, expected.output, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(result.lse, expected.lse, rtol=2e-4, atol=2e-5)
