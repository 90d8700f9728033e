"""Checks of everything a caller of the page pool's operations can get wrong; nothing is changed before they pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pagedkv.compute.backend import AttentionBatch, AttentionParams
from pagedkv.compute.layout import KvLayout
from pagedkv.config import require
from pagedkv.errors import InvalidArgument

SOURCE_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def check_layer(layout: KvLayout, layer: int) -> None:
    """Refuse a layer that the pool does not have."""
    limit = layout.shape.num_layers
    require(0 <= layer < limit, "layer", f"must be in [0, {limit})", layer, limit - 1)


def check_rows(array: Any, field: str, num_heads: int, head_dim: int) -> None:
    """Refuse anything but an array [num_tokens, num_heads, head_dim] of a float type that kernels read."""
    if isinstance(array, np.ndarray) and array.shape[1:] == (num_heads, head_dim) and array.dtype in SOURCE_DTYPES:
        return
    require(isinstance(array, np.ndarray), field, "must be a NumPy array", type(array).__name__)
    expected = f"[num_tokens, {num_heads}, {head_dim}]"
    fits = array.ndim == 3 and array.shape[1:] == (num_heads, head_dim)
    require(fits, field, f"must have shape {expected}", array.shape, expected)
    names = ", ".join(dtype.name for dtype in SOURCE_DTYPES)
    require(array.dtype in SOURCE_DTYPES, field, f"must have a dtype of {names}", str(array.dtype), names)


def check_write(layout: KvLayout, layer: int, keys: Any, values: Any, slot_mapping: npt.NDArray[Any]) -> None:
    """Check the arguments of `write_kv`."""
    check_layer(layout, layer)
    shape = layout.shape
    check_rows(keys, "keys", shape.num_kv_heads, shape.head_dim)
    check_rows(values, "values", shape.num_kv_heads, shape.head_dim)
    require(len(values) == len(keys), "values", f"must have as many tokens as keys ({len(keys)})", len(values))
    require(values.dtype == keys.dtype, "values", f"must have the keys' dtype ({keys.dtype})", str(values.dtype))
    _check_integers(slot_mapping, "slot_mapping", (len(keys),))
    check_slots(layout, slot_mapping)


def check_slots(layout: KvLayout, slot_mapping: npt.NDArray[Any]) -> None:
    """Refuse slots outside the pool; -1 means "do not write"."""
    _check_range(slot_mapping, "slot_mapping", -1, layout.num_blocks * layout.block_size)


def check_block_id(layout: KvLayout, block_id: int, field: str = "block_id") -> None:
    """Refuse a block id outside the pool."""
    require(0 <= block_id < layout.num_blocks, field, f"must be in [0, {layout.num_blocks})", block_id)


def check_copies(layout: KvLayout, copies: Sequence[tuple[int, int]]) -> None:
    """Refuse ids outside the pool and two different sources for one destination."""
    sources: dict[int, int] = {}
    for source, destination in copies:
        check_block_id(layout, source, "copies")
        check_block_id(layout, destination, "copies")
        if sources.setdefault(destination, source) != source:
            raise InvalidArgument(f"block {destination} has two sources", field="copies", block_id=destination)


def check_call(layout: KvLayout, layer: int, queries: Any, params: AttentionParams) -> None:
    """Check what an attention call names besides its batch."""
    check_layer(layout, layer)
    check_rows(queries, "queries", layout.shape.num_heads, layout.shape.head_dim)
    check_params(layout, params)


def check_batch(layout: KvLayout, batch: AttentionBatch, window: int | None) -> None:
    """Check a batch's lengths, and the block ids that attention would read."""
    _check_integers(batch.context_lens, "context_lens", np.shape(batch.context_lens)[:1])
    _check_integers(batch.query_starts, "query_starts", (len(batch.context_lens) + 1,))
    _check_lengths(batch)
    _check_tables(layout, batch, window)


def check_num_queries(batch: AttentionBatch, queries: npt.NDArray[Any]) -> None:
    """Refuse queries that are not those the batch describes."""
    last = int(batch.query_starts[-1])
    require(last == len(queries), "query_starts", f"must end at the number of queries ({len(queries)})", last)


def check_parts(layout: KvLayout, outputs: Any, lses: Any) -> None:
    """Check the arguments of `merge_states`."""
    for field, array in (("outputs", outputs), ("lses", lses)):
        is_float = isinstance(array, np.ndarray) and array.dtype == np.float32
        require(is_float, field, "must be a float32 array", getattr(array, "dtype", type(array).__name__))
    shape = (layout.shape.num_heads, layout.shape.head_dim)
    expected = f"[num_parts, num_queries, {shape[0]}, {shape[1]}]"
    fits = outputs.ndim == 4 and len(outputs) >= 1 and outputs.shape[2:] == shape
    require(fits, "outputs", f"must have shape {expected}", outputs.shape, expected)
    require(lses.shape == outputs.shape[:3], "lses", f"must have shape {outputs.shape[:3]}", lses.shape)


def check_params(layout: KvLayout, params: AttentionParams) -> None:
    """Check the options of one attention call."""
    scale, window, soft_cap = params.scale, params.window, params.soft_cap
    require(scale is None or math.isfinite(scale), "scale", "must be finite", scale)
    require(window is None or window >= 1, "window", "must be at least 1", window, 1)
    positive = soft_cap is None or (math.isfinite(soft_cap) and soft_cap > 0)
    require(positive, "soft_cap", "must be finite and positive", soft_cap)
    for field, per_head in (("alibi_slopes", params.alibi_slopes), ("sinks", params.sinks)):
        if per_head is None:
            continue
        shape = (layout.shape.num_heads,)
        require(np.shape(per_head) == shape, field, f"must have shape {shape}", np.shape(per_head))
        require(not np.isnan(per_head).any(), field, "must hold no NaN", "NaN")


def _check_integers(array: Any, field: str, shape: tuple[int, ...]) -> None:
    fits = isinstance(array, np.ndarray) and array.dtype.kind == "i" and array.shape == shape
    what = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
    require(fits, field, f"must be an integer array of shape {list(shape)}", what)


def _check_range(array: npt.NDArray[Any], field: str, low: int, high: int) -> None:
    if array.size and (array.min() < low or array.max() >= high):
        worst = array.min() if array.min() < low else array.max()
        raise InvalidArgument(f"must be in [{low}, {high}), got {worst}", field=field, value=worst, limit=high - 1)


def _check_lengths(batch: AttentionBatch) -> None:
    starts, contexts = batch.query_starts, batch.context_lens
    require(bool(starts[0] == 0), "query_starts", "must start at 0", int(starts[0]), 0)
    query_lens = np.diff(starts)
    bad = np.flatnonzero(query_lens < 0)
    if bad.size:
        raise InvalidArgument(f"must not fall, does after sequence {bad[0]}", field="query_starts", index=bad[0])
    bad = np.flatnonzero(contexts < query_lens)
    if bad.size:
        index = int(bad[0])
        message = f"sequence {index} has {query_lens[index]} queries but a context of {contexts[index]}"
        raise InvalidArgument(message, field="context_lens", index=index, value=contexts[index])


def _check_tables(layout: KvLayout, batch: AttentionBatch, window: int | None) -> None:
    tables, contexts = batch.block_tables, batch.context_lens
    fits = isinstance(tables, np.ndarray) and tables.ndim == 2 and tables.dtype.kind == "i"
    fits = fits and len(tables) == len(contexts)
    require(fits, "block_tables", f"must be an integer array [{len(contexts)}, max_blocks]", np.shape(tables))
    counts = -(-contexts.astype(np.int64) // layout.block_size)
    bad = np.flatnonzero(counts > tables.shape[1])
    if bad.size:
        index = int(bad[0])
        message = f"sequence {index} needs {counts[index]} blocks, the table holds {tables.shape[1]}"
        raise InvalidArgument(message, field="context_lens", index=index, value=contexts[index])
    columns = np.arange(tables.shape[1])
    read = columns < counts[:, None]
    if window is not None:
        oldest = np.maximum(0, contexts - np.diff(batch.query_starts) - window + 1)
        read &= columns >= (oldest // layout.block_size)[:, None]
    wrong = read & ((tables < 0) | (tables >= layout.num_blocks))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        message = f"sequence {row} names block {tables[row, column]}, must be in [0, {layout.num_blocks})"
        raise InvalidArgument(message, field="block_tables", index=row, value=tables[row, column])


def check_block_data(layout: KvLayout, data: Any) -> None:
    """Refuse anything but the bytes of one block."""
    fits = isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.shape == (layout.block_bytes,)
    require(fits, "data", f"must be uint8 [{layout.block_bytes}]", np.shape(data), layout.block_bytes)
