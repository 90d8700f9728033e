"""The server's answers: messages become values; the other place here where x_count meets num_x."""

from __future__ import annotations

from pagedkv.client.tensors import DTYPES, to_array
from pagedkv.client.types import Attention, CacheInfo, Chunk, ModelInfo, SequenceInfo, Swap, Usage
from pagedkv.dtypes import DType
from pagedkv.errors import TransportError
from pagedkv.v1 import generation_pb2, kv_cache_pb2, tensor_pb2

_FINISH_REASONS = {
    generation_pb2.FINISH_REASON_UNSPECIFIED: None,
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_CANCELLED: "cancelled",
}


def to_cache_info(message: kv_cache_pb2.GetCacheInfoResponse) -> CacheInfo:
    """Return the pool's geometry."""
    return CacheInfo(
        num_blocks=message.block_count,
        block_size=message.block_size,
        num_layers=message.layer_count,
        num_heads=message.head_count,
        num_kv_heads=message.kv_head_count,
        head_dim=message.head_dim,
        dtype=_dtype(message.data_type),
        backend=message.backend,
        max_sequence_tokens=message.sequence_token_limit,
        block_bytes=message.block_bytes,
        num_host_blocks=message.host_block_count,
    )


def to_attention(message: kv_cache_pb2.AttendResponse) -> Attention:
    """Return the result of an attend call."""
    return Attention(to_array(message.output), to_array(message.lse), message.compute_seconds)


def to_sequence(message: kv_cache_pb2.Sequence) -> SequenceInfo:
    """Return one sequence."""
    return SequenceInfo(
        sequence_id=message.sequence_id,
        num_tokens=message.token_count,
        layer_lengths=tuple(message.layer_lengths),
        block_table=tuple(message.block_table),
        num_cached_tokens=message.cached_token_count,
        is_swapped=message.state == kv_cache_pb2.SEQUENCE_STATE_SWAPPED,
        host_block_table=tuple(message.host_block_table),
    )


def to_swap(message: kv_cache_pb2.SwapOutResponse | kv_cache_pb2.SwapInResponse) -> Swap:
    """Return what a swap copied."""
    return Swap(message.block_count, message.byte_count, message.kept_block_count)


def to_usage(message: kv_cache_pb2.GetUsageResponse) -> Usage:
    """Return the blocks by state."""
    return Usage(
        free=message.free_count,
        cached=message.cached_count,
        private=message.private_count,
        shared=message.shared_count,
        pinned=message.pinned_count,
        in_flight=message.in_flight_count,
        total=message.total_count,
        num_tokens=message.token_count,
        host_free=message.host_free_count,
        host_private=message.host_private_count,
        host_shared=message.host_shared_count,
        host_total=message.host_total_count,
        num_swapped=message.swapped_sequence_count,
        swapped_tokens=message.swapped_token_count,
    )


def to_chunk(message: generation_pb2.GenerateResponse) -> Chunk:
    """Return the next piece of a generation."""
    return Chunk(
        text=message.text,
        token_ids=tuple(message.token_ids),
        finish_reason=_FINISH_REASONS.get(message.finish_reason, "other"),
        num_prompt_tokens=message.prompt_token_count,
        num_cached_tokens=message.cached_token_count,
        num_output_tokens=message.output_token_count,
    )


def to_model_info(message: generation_pb2.GetModelInfoResponse) -> ModelInfo:
    """Return the served model's description."""
    return ModelInfo(message.architecture, message.vocabulary_size, message.token_limit, tuple(message.eos_token_ids))


def _dtype(data_type: tensor_pb2.DataType.ValueType) -> DType:
    dtype = DTYPES.get(data_type)
    if dtype is None:
        message = f"the pool's data type {data_type} is not known here; is the server newer than the client?"
        raise TransportError(message, code="UNIMPLEMENTED")
    return dtype
