"""The client's requests: arguments, checked, become messages; the one place here where num_x meets x_count."""

from __future__ import annotations

from typing import Any

from pagedkv.client.arguments import (
    INT32_MAX,
    INT64_MAX,
    UINT64_MAX,
    flag,
    float32,
    float32s,
    integer,
    integers,
    items,
    number,
    octets,
    optional,
    positive_float32,
    refuse,
    text,
    texts,
)
from pagedkv.client.conversation import to_turns
from pagedkv.client.tensors import as_array, to_tensor
from pagedkv.v1 import generation_pb2, kv_cache_pb2, tensor_pb2


def allocate_request(sequence_id: Any, token_ids: Any, salt: Any, request_id: Any) -> kv_cache_pb2.AllocateRequest:
    """Return the message of AsyncClient.allocate."""
    return kv_cache_pb2.AllocateRequest(
        sequence_id=text("sequence_id", sequence_id),
        token_ids=_ids("token_ids", token_ids),
        salt=optional(octets, "salt", salt),
        request_id=text("request_id", request_id),
    )


def append_request(
    sequence_id: Any, keys: Any, values: Any, *, layer: Any, position: Any, token_ids: Any
) -> kv_cache_pb2.AppendRequest:
    """Return the message of AsyncClient.append."""
    return kv_cache_pb2.AppendRequest(
        sequence_id=text("sequence_id", sequence_id),
        layer=optional(integer, "layer", layer, 0, INT32_MAX),
        position=optional(integer, "position", position, 0, INT64_MAX),
        token_ids=_ids("token_ids", token_ids),
        keys=to_tensor(keys, "keys"),
        values=to_tensor(values, "values"),
    )


def make_attend_request(
    sequence_ids: Any,
    queries: Any,
    *,
    layer: Any,
    query_lens: Any = None,
    keys: Any = None,
    values: Any = None,
    positions: Any = None,
    token_ids: Any = None,
    scale: Any = None,
    window: Any = None,
    soft_cap: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
) -> kv_cache_pb2.AttendRequest:
    """Return the message of one attend call."""
    return kv_cache_pb2.AttendRequest(
        sequence_ids=texts("sequence_ids", sequence_ids),
        layer=integer("layer", layer, 0, INT32_MAX),
        query_lengths=_ids("query_lens", query_lens),
        positions=optional(integers, "positions", positions, 0, INT64_MAX),
        token_ids=_ids("token_ids", token_ids),
        options=kv_cache_pb2.AttentionOptions(
            scale=optional(float32, "scale", scale),
            window=optional(integer, "window", window, 1, INT32_MAX),
            soft_cap=optional(positive_float32, "soft_cap", soft_cap),
            alibi_slopes=_per_head("alibi_slopes", alibi_slopes),
            sinks=_per_head("sinks", sinks),
        ),
        queries=to_tensor(queries, "queries"),
        keys=_optional_tensor("keys", keys),
        values=_optional_tensor("values", values),
    )


def fork_request(parent_id: Any, child_id: Any, request_id: Any) -> kv_cache_pb2.ForkRequest:
    """Return the message of AsyncClient.fork."""
    return kv_cache_pb2.ForkRequest(
        parent_id=text("parent_id", parent_id),
        child_id=text("child_id", child_id),
        request_id=text("request_id", request_id),
    )


def truncate_request(sequence_id: Any, num_tokens: Any) -> kv_cache_pb2.TruncateRequest:
    """Return the message of AsyncClient.truncate."""
    return kv_cache_pb2.TruncateRequest(
        sequence_id=text("sequence_id", sequence_id), token_count=integer("num_tokens", num_tokens, 0, INT64_MAX)
    )


def generate_request(
    prompt: Any,
    token_ids: Any,
    messages: Any,
    *,
    max_tokens: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    seed: Any,
    stop: Any,
    stop_token_ids: Any,
    ignore_eos: Any,
    salt: Any,
) -> generation_pb2.GenerateRequest:
    """Return the message of AsyncClient.generate."""
    sampling = generation_pb2.SamplingOptions(
        max_tokens=optional(integer, "max_tokens", max_tokens, 1, INT32_MAX),
        temperature=optional(
            number, "temperature", temperature, "finite and at least 0", lambda real: 0 <= real < float("inf")
        ),
        top_k=integer("top_k", top_k, 0, INT32_MAX),
        top_p=optional(number, "top_p", top_p, "in (0, 1]", lambda real: 0 < real <= 1),
        seed=optional(integer, "seed", seed, 0, UINT64_MAX),
        stop=texts("stop", stop),
        stop_token_ids=integers("stop_token_ids", stop_token_ids, 0, INT32_MAX),
        ignore_eos=flag("ignore_eos", ignore_eos),
    )
    salt = optional(octets, "salt", salt)
    return generation_pb2.GenerateRequest(**_prompt(prompt, token_ids, messages), sampling=sampling, salt=salt)


def tokenize_request(prompt: Any, add_special: Any, parse_special: Any) -> generation_pb2.TokenizeRequest:
    """Return the message of AsyncClient.tokenize."""
    return generation_pb2.TokenizeRequest(
        text=text("text", prompt),
        omit_special=not flag("add_special", add_special),
        parse_special=flag("parse_special", parse_special),
    )


def detokenize_request(token_ids: Any, skip_special: Any) -> generation_pb2.DetokenizeRequest:
    """Return the message of AsyncClient.detokenize."""
    return generation_pb2.DetokenizeRequest(
        token_ids=integers("token_ids", token_ids, 0, INT32_MAX),
        keep_special=not flag("skip_special", skip_special),
    )


def _prompt(prompt: Any, token_ids: Any, messages: Any) -> dict[str, Any]:
    given = [value for value in (prompt, token_ids, messages) if value is not None]
    if len(given) != 1:
        refuse("prompt", "give exactly one of prompt, token_ids and messages", len(given), 1)
    if prompt is not None:
        return {"text": generation_pb2.TextPrompt(text=text("prompt", prompt))}
    if token_ids is not None:
        return {"tokens": generation_pb2.TokenPrompt(token_ids=_ids("token_ids", token_ids))}
    return {"chat": generation_pb2.ChatPrompt(messages=to_turns(messages))}


def _ids(field: str, numbers: Any) -> list[int]:
    """Return what the wire has as repeated int32 and the service as counts or ids; none for None."""
    return [] if numbers is None else integers(field, numbers, 0, INT32_MAX)


def _per_head(field: str, values: Any) -> list[float]:
    if values is None:
        return []
    is_array = not isinstance(values, (list, tuple)) and hasattr(values, "shape")
    return float32s(field, as_array(values, field).tolist() if is_array else items(field, values, "numbers"))


def _optional_tensor(field: str, source: Any) -> tensor_pb2.Tensor | None:
    return None if source is None else to_tensor(source, field)
