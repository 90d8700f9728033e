"""Between messages and values: the one place where x_count meets num_x."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pagedkv.cache import SequenceView, Usage
from pagedkv.compute.backend import AttentionParams
from pagedkv.compute.layout import KvLayout
from pagedkv.config import KvShape, require
from pagedkv.dtypes import DType
from pagedkv.errors import InvalidArgument
from pagedkv.rpc.intake import delimited
from pagedkv.v1 import kv_cache_pb2, tensor_pb2

DATA_TYPES: dict[DType, tensor_pb2.DataType.ValueType] = {
    DType.FLOAT32: tensor_pb2.DATA_TYPE_FLOAT32,
    DType.FLOAT16: tensor_pb2.DATA_TYPE_FLOAT16,
    DType.BFLOAT16: tensor_pb2.DATA_TYPE_BFLOAT16,
    DType.INT8: tensor_pb2.DATA_TYPE_INT8,
    DType.FLOAT8_E4M3: tensor_pb2.DATA_TYPE_FLOAT8_E4M3,
}
_NUMPY_TYPES: dict[int, np.dtype[Any]] = {
    tensor_pb2.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.DATA_TYPE_FLOAT16: np.dtype("<f2"),
    tensor_pb2.DATA_TYPE_BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
_MAX_RANK = 4
_MAX_EXTENT = 2**31 - 1
_ANSWER_SHELL_BYTES = 256  # of an answer without its elements: tags, types, shapes, lengths, seconds


def to_array(tensor: tensor_pb2.Tensor, field: str, elements: memoryview | None = None) -> npt.NDArray[Any]:
    """Return a read-only view of the tensor's elements, or of those that were cut out of it.

    Raises InvalidArgument naming what does not fit. Elements that came at an odd address are copied.
    """
    dtype = _NUMPY_TYPES.get(tensor.data_type)
    if dtype is None:
        known = ", ".join(tensor_pb2.DataType.Name(kind) for kind in _NUMPY_TYPES)  # type: ignore[arg-type]
        raise InvalidArgument(f"must be one of {known}", field=f"{field}.data_type", value=tensor.data_type)
    rank = len(tensor.shape)
    require(0 < rank <= _MAX_RANK, f"{field}.shape", f"must have 1 to {_MAX_RANK} extents", rank, _MAX_RANK)
    shape = tuple(tensor.shape)
    require(min(shape) >= 0, f"{field}.shape", "must not be negative", shape, 0)
    require(max(shape) <= _MAX_EXTENT, f"{field}.shape", "must be smaller", shape, _MAX_EXTENT)
    data = tensor.data if elements is None else elements
    num_bytes = math.prod(shape) * dtype.itemsize
    given = len(data)
    require(given == num_bytes, f"{field}.data", f"must hold {num_bytes} bytes for shape {shape}", given, num_bytes)
    if not given:
        require(math.prod(filter(None, shape)) <= _MAX_EXTENT, f"{field}.shape", "must be smaller", shape, _MAX_EXTENT)
    return np.require(np.frombuffer(data, dtype=dtype).reshape(shape), requirements="A")


def attend_answer_bytes(num_queries: int, shape: KvShape) -> int:
    """Return the size that no answer to an Attend call of so many queries passes."""
    return num_queries * shape.num_heads * (shape.head_dim + 1) * 4 + _ANSWER_SHELL_BYTES


def to_attend_answer(output: npt.NDArray[np.float32], lse: npt.NDArray[np.float32], seconds: float) -> bytes:
    """Return an AttendResponse as the wire has it, its elements copied once; the message's own way copies them thrice.

    Fields of a message may come in pieces: each tensor is its type and shape, then its elements.
    """
    rest = kv_cache_pb2.AttendResponse(compute_seconds=seconds).SerializeToString()
    pieces = (*_pieces("output", output), *_pieces("lse", lse), rest)
    return b"".join(pieces)


def _pieces(name: str, array: npt.NDArray[np.float32]) -> tuple[bytes | memoryview, ...]:
    shell = tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=array.shape).SerializeToString()
    elements = np.ascontiguousarray(array, dtype="<f4").reshape(-1).data.cast("B")
    shell += delimited(tensor_pb2.Tensor.DESCRIPTOR.fields_by_name["data"].number, len(elements))
    field = kv_cache_pb2.AttendResponse.DESCRIPTOR.fields_by_name[name].number
    return delimited(field, len(shell) + len(elements)), shell, elements


def check_shape(array: npt.NDArray[Any], field: str, expected: Sequence[int | None]) -> None:
    """Raise InvalidArgument unless the array has this shape; None matches any extent."""
    fits = array.ndim == len(expected) and all(
        want is None or have == want for have, want in zip(array.shape, expected, strict=True)
    )
    shown = "[" + ", ".join("*" if want is None else str(want) for want in expected) + "]"
    require(fits, f"{field}.shape", f"must be {shown}", list(array.shape), shown)


def to_attention_params(options: kv_cache_pb2.AttentionOptions, shape: KvShape) -> AttentionParams:
    """Return the options of one attention call, checked."""
    scale = options.scale if options.HasField("scale") else None
    window = options.window if options.HasField("window") else None
    soft_cap = options.soft_cap if options.HasField("soft_cap") else None
    require(scale is None or math.isfinite(scale), "options.scale", "must be finite", scale)
    require(window is None or window >= 1, "options.window", "must be at least 1", window, 1)
    is_positive = soft_cap is None or (math.isfinite(soft_cap) and soft_cap > 0)
    require(is_positive, "options.soft_cap", "must be finite and above 0", soft_cap, 0)
    return AttentionParams(
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        alibi_slopes=_per_head(options.alibi_slopes, "options.alibi_slopes", shape),
        sinks=_per_head(options.sinks, "options.sinks", shape),
    )


def _per_head(values: Sequence[float], field: str, shape: KvShape) -> npt.NDArray[np.float32] | None:
    if not len(values):
        return None
    count = len(values)
    require(count == shape.num_heads, field, "must hold one a query head", count, shape.num_heads)
    array = np.array(values, dtype=np.float32)
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        require(False, f"{field}[{bad[0]}]", "must be finite", float(array[bad[0]]))
    return array


def to_cache_info(
    layout: KvLayout, backend: str, sequence_limit: int, num_host_blocks: int
) -> kv_cache_pb2.GetCacheInfoResponse:
    """Return the pool's description."""
    return kv_cache_pb2.GetCacheInfoResponse(
        block_count=layout.num_blocks,
        block_size=layout.block_size,
        layer_count=layout.shape.num_layers,
        head_count=layout.shape.num_heads,
        kv_head_count=layout.shape.num_kv_heads,
        head_dim=layout.shape.head_dim,
        data_type=DATA_TYPES[layout.shape.dtype],
        backend=backend,
        sequence_token_limit=sequence_limit,
        block_bytes=layout.block_bytes,
        host_block_count=num_host_blocks,
    )


def to_usage_message(usage: Usage) -> kv_cache_pb2.GetUsageResponse:
    """Return the block counts."""
    return kv_cache_pb2.GetUsageResponse(
        free_count=usage.free,
        cached_count=usage.cached,
        private_count=usage.private,
        shared_count=usage.shared,
        pinned_count=usage.pinned,
        in_flight_count=usage.in_flight,
        total_count=usage.total,
        token_count=usage.num_tokens,
        host_free_count=usage.host_free,
        host_private_count=usage.host_private,
        host_shared_count=usage.host_shared,
        host_total_count=usage.host_total,
        swapped_sequence_count=usage.num_swapped,
        swapped_token_count=usage.swapped_tokens,
    )


def to_sequence_message(view: SequenceView) -> kv_cache_pb2.Sequence:
    """Return a sequence, with as much of its tables and layer lengths as the view has."""
    swapped, resident = kv_cache_pb2.SEQUENCE_STATE_SWAPPED, kv_cache_pb2.SEQUENCE_STATE_RESIDENT
    return kv_cache_pb2.Sequence(
        sequence_id=view.sequence_id,
        token_count=view.num_tokens,
        layer_lengths=view.layer_lengths,
        block_table=view.block_table,
        cached_token_count=view.num_cached_tokens,
        state=swapped if view.is_swapped else resident,
        host_block_table=view.host_table or (),
    )
