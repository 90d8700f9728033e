"""The parts of a KvCache request, checked: each raises InvalidArgument with its field before anything is touched."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.cache.live import MAX_ID_LENGTH
from pagedkv.config import KvShape, check_count, check_length, require
from pagedkv.errors import PositionMismatch
from pagedkv.rpc.convert import check_shape, to_array
from pagedkv.rpc.intake import TensorRequest
from pagedkv.rpc.limits import MAX_SEQUENCES, MAX_TOKEN_IDS
from pagedkv.rpc.rows import check_storable

Array = npt.NDArray[Any]
_RESERVED_PREFIX = "~"  # ids of the engine's own sequences


def continues(position: int, num_tokens: int, length: int, *, field: str = "position") -> bool:
    """Whether rows at `position` continue a layer of this length; False for a retry of rows that are there."""
    require(position >= 0, field, "must not be negative", position, 0)
    if position == length:
        return True
    if position + num_tokens <= length:
        return False
    raise PositionMismatch("the rows do not continue the layer", position=position, expected=length)


def check_own_id(field: str, sequence_id: str) -> None:
    """Refuse no id, one that is too long, and the ids of the engine."""
    require(bool(sequence_id), field, "is required", sequence_id)
    check_length(field, sequence_id, MAX_ID_LENGTH)
    reserved = sequence_id.startswith(_RESERVED_PREFIX)
    require(not reserved, field, f'must not begin with "{_RESERVED_PREFIX}"', sequence_id)


def check_sequence_ids(ids: Sequence[str]) -> None:
    """Refuse no ids, too many, the ids of the engine, and an id twice."""
    require(len(ids) >= 1, "sequence_ids", "must hold at least one", len(ids), 1)
    check_count("sequence_ids", len(ids), MAX_SEQUENCES)
    seen: set[str] = set()
    for at, name in enumerate(ids):
        check_own_id(f"sequence_ids[{at}]", name)
        require(name not in seen, f"sequence_ids[{at}]", "names a sequence twice", name)
        seen.add(name)


def read_token_ids(token_ids: Sequence[int], num_tokens: int | None = None) -> array[int] | None:
    """Return the ids of new tokens as int32, None if they were not given; refuses negative ones."""
    count = len(token_ids)
    if not count:
        return None
    if num_tokens is not None:
        require(count == num_tokens, "token_ids", "must hold one a token", count, num_tokens)
    check_count("token_ids", count, MAX_TOKEN_IDS)
    packed = array("i", token_ids)
    is_negative = np.frombuffer(packed, np.int32) < 0
    if is_negative.any():
        at = int(np.argmax(is_negative))
        require(False, f"token_ids[{at}]", "must not be negative", packed[at], 0)
    return packed


def read_query_lengths(query_lengths: Sequence[int], num_sequences: int) -> list[int]:
    """Return the number of queries for each sequence, 1 each if they were not given."""
    if not query_lengths:
        return [1] * num_sequences
    count = len(query_lengths)
    require(count == num_sequences, "query_lengths", "must hold one a sequence", count, num_sequences)
    for at, length in enumerate(query_lengths):
        require(length >= 0, f"query_lengths[{at}]", "must not be negative", length, 0)
    return list(query_lengths)


def read_new_rows(arrived: TensorRequest[Any], layer: int | None, shape: KvShape) -> tuple[Array, Array]:
    """Return K and V, of one layer or [num_layers, ...], checked against the pool's shape and type and each other."""
    request = arrived.message
    for field in ("keys", "values"):
        require(request.HasField(field), field, "is required, keys and values come together", None)
    row = (None, shape.num_kv_heads, shape.head_dim)
    expected = row if layer is not None else (shape.num_layers, *row)
    if layer is not None:
        limit = shape.num_layers
        require(0 <= layer < limit, "layer", f"must be in [0, {limit})", layer, limit)
    keys, values = (to_array(getattr(request, name), name, arrived.elements.get(name)) for name in ("keys", "values"))
    check_shape(keys, "keys", expected)
    check_shape(values, "values", keys.shape)
    require(values.dtype == keys.dtype, "values.data_type", f"must be that of keys ({keys.dtype})", values.dtype)
    check_storable(keys, "keys.data", shape.dtype)
    check_storable(values, "values.data", shape.dtype)
    return keys, values
