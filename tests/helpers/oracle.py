"""The one independent attention oracle: plain float64 NumPy over contiguous keys and values, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class OracleResult:
    """`output` [num_queries, num_heads, head_dim] and `lse` [num_queries, num_heads], float64."""

    output: Float64Array
    lse: Float64Array


def oracle_attention(
    queries: npt.NDArray[np.generic],
    keys: Sequence[npt.NDArray[np.generic]],
    values: Sequence[npt.NDArray[np.generic]],
    query_lens: Sequence[int],
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: npt.NDArray[np.generic] | None = None,
    sinks: npt.NDArray[np.generic] | None = None,
) -> OracleResult:
    """Attend queries [sum(query_lens), num_heads, head_dim] to dense keys and values.

    `keys[s]` and `values[s]` are [context_len, num_kv_heads, head_dim]; the last `query_lens[s]` keys are those of
    the queries themselves. Semantics as `AttentionParams` states them.
    """
    exact = np.asarray(queries).astype(np.float64)
    num_heads, head_dim = exact.shape[1:]
    output, lse = np.zeros(exact.shape), np.full(exact.shape[:2], -np.inf)
    row = 0
    for sequence_keys, sequence_values, query_len in zip(keys, values, query_lens, strict=True):
        k, v = sequence_keys.astype(np.float64), sequence_values.astype(np.float64)
        for index in range(query_len):
            position = len(k) - query_len + index
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(num_heads):
                kv_head = head * k.shape[1] // num_heads
                scores = k[first : position + 1, kv_head] @ exact[row, head]
                scores *= 1 / np.sqrt(head_dim) if scale is None else scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                if alibi_slopes is not None:
                    scores += float(alibi_slopes[head]) * (np.arange(first, position + 1) - position)
                sink = None if sinks is None else float(sinks[head])
                output[row, head], lse[row, head] = _softmax_row(scores, v[first : position + 1, kv_head], sink)
            row += 1
    assert row == len(exact)
    return OracleResult(output, lse)


def _softmax_row(scores: Float64Array, values: Float64Array, sink: float | None) -> tuple[Float64Array, float]:
    if len(scores) == 0:
        return np.zeros(values.shape[-1]), -np.inf
    peak = max(scores.max(), -np.inf if sink is None else sink)
    weights = np.exp(scores - peak)
    total = weights.sum() + (0.0 if sink is None else np.exp(sink - peak))
    return weights @ values / total, float(peak + np.log(total))


def oracle_merge(outputs: npt.NDArray[np.generic], lses: npt.NDArray[np.generic]) -> OracleResult:
    """Merge partial results [num_parts, num_queries, num_heads(, head_dim)]; empty parts have lse -inf."""
    parts, logs = np.asarray(outputs, dtype=np.float64), np.asarray(lses, dtype=np.float64)
    output, lse = np.zeros(parts.shape[1:]), np.full(logs.shape[1:], -np.inf)
    for at in np.ndindex(*lse.shape):
        live = [part for part in range(len(parts)) if logs[(part, *at)] > -np.inf]
        if not live:
            continue
        peak = max(logs[(part, *at)] for part in live)
        weights = [np.exp(logs[(part, *at)] - peak) for part in live]
        lse[at] = peak + np.log(sum(weights))
        output[at] = sum(w * parts[(part, *at)] for w, part in zip(weights, live, strict=True)) / sum(weights)
    return OracleResult(output, lse)
