"""Bad requests as they come over the wire: each gets its error, with one ErrorInfo, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from helpers.server import SHAPE
from helpers.wire import make_attend_message, make_queries, make_rows
from pagedkv import errors
from pagedkv.client import Client
from pagedkv.client.failure import to_exception
from pagedkv.client.tensors import to_tensor
from pagedkv.v1 import kv_cache_pb2, kv_cache_pb2_grpc, tensor_pb2

Make = Callable[[], Any]
LAYERS = SHAPE.num_layers
FLOAT32 = tensor_pb2.DATA_TYPE_FLOAT32
ROW = SHAPE.num_kv_heads * SHAPE.head_dim * 4


@pytest.fixture(scope="module")
def prepared(client: Client) -> Iterator[Client]:
    """The module's server with three sequences: live (20 tokens), uneven (3 tokens in layer 0), big (480 tokens)."""
    for name, num_tokens in (("live", 20), ("big", 480)):
        client.allocate(name)
        client.append(name, *make_rows(num_tokens, num_layers=LAYERS))
    client.allocate("uneven")
    client.append("uneven", *make_rows(3), layer=0)
    client.allocate("empty")
    client.allocate("typed", list(range(40)))
    yield client
    client.free(["live", "big", "uneven", "empty", "typed"])


@pytest.fixture(scope="module")
def stub(served: Any) -> Iterator[Any]:
    with grpc.insecure_channel(served.address) as channel:
        yield kv_cache_pb2_grpc.KvCacheStub(channel)


def attend(names: list[str] | None = None, queries: Any = None, *, layer: int = 0, **options: Any) -> Any:
    names = ["live"] if names is None else names
    return make_attend_message(names, make_queries(len(names)) if queries is None else queries, layer=layer, **options)


def writing(names: list[str], query_lens: list[int], **options: Any) -> Any:
    keys, values = make_rows(sum(query_lens))
    given = {"keys": keys, "values": values, "query_lens": query_lens, **options}
    return attend(names, make_queries(sum(query_lens)), **given)


def append(name: str = "live", rows: Any = None, **options: Any) -> Any:
    keys, values = make_rows(2, num_layers=None if "layer" in options else LAYERS) if rows is None else rows
    return kv_cache_pb2.AppendRequest(
        sequence_id=name, keys=to_tensor(keys, "keys"), values=to_tensor(values, "values"), **options
    )


def append_tensor(**fields: Any) -> Any:
    request = append(layer=0)
    request.keys.CopyFrom(tensor_pb2.Tensor(**fields))
    return request


def with_nan() -> np.ndarray:
    queries = make_queries(1)
    queries[0, 2, 5] = np.nan
    return queries


def spoiled(field: str, value: float, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Return K and V of two tokens, of which one has a bad element in the second."""
    rows = {name: array.astype(dtype) for name, array in zip(("keys", "values"), make_rows(2), strict=True)}
    rows[field][1, 0, 63] = value
    return rows


def append_spoiled(field: str, value: float, dtype: Any = np.float32) -> Any:
    return append("empty", list(spoiled(field, value, dtype).values()), layer=0)


def attend_spoiled(field: str, value: float, dtype: Any = np.float32) -> Any:
    return attend(["empty"], make_queries(2), query_lens=[2], **spoiled(field, value, dtype))


def spoiled_queries(value: float) -> np.ndarray:
    queries = make_queries(1)
    queries[0, 3, 63] = value
    return queries


def attend_with(**fields: Any) -> Any:
    request = attend()
    for name, values in fields.items():
        target = request.options if name in ("alibi_slopes", "sinks") else request
        getattr(target, name).extend(values)
    return request


SHAPES: dict[str, tuple[str, Make]] = {
    "no data type": ("keys.data_type", lambda: append_tensor(shape=[2, 2, 64], data=bytes(2 * ROW))),
    "int8 rows": ("keys.data_type", lambda: append_tensor(data_type=4, shape=[2, 2, 64], data=bytes(256))),
    "unknown data type": ("keys.data_type", lambda: append_tensor(data_type=77, shape=[2, 2, 64], data=bytes(256))),
    "no shape": ("keys.shape", lambda: append_tensor(data_type=FLOAT32, data=bytes(4))),
    "five extents": ("keys.shape", lambda: append_tensor(data_type=FLOAT32, shape=[1] * 5, data=bytes(4))),
    "negative extent": ("keys.shape", lambda: append_tensor(data_type=FLOAT32, shape=[-2, 2, 64], data=bytes(4))),
    "two negative extents": ("keys.shape", lambda: append_tensor(data_type=FLOAT32, shape=[-1, -1, 1], data=bytes(4))),
    "extents that overflow": ("keys.shape", lambda: append_tensor(data_type=FLOAT32, shape=[2**62, 4, 1], data=b"")),
    "vast and empty": (
        "keys.shape",
        lambda: append_tensor(data_type=FLOAT32, shape=[0, 2**31 - 1, 2**31 - 1], data=b""),
    ),
    "one byte short": (
        "keys.data",
        lambda: append_tensor(data_type=FLOAT32, shape=[2, 2, 64], data=bytes(2 * ROW - 1)),
    ),
    "one byte more": ("keys.data", lambda: append_tensor(data_type=FLOAT32, shape=[2, 2, 64], data=bytes(2 * ROW + 1))),
    "no data": ("keys.data", lambda: append_tensor(data_type=FLOAT32, shape=[2, 2, 64])),
    "wrong KV heads": ("keys.shape", lambda: append(rows=[np.zeros((2, 4, 64))] * 2, layer=0)),
    "wrong head dim": ("keys.shape", lambda: append(rows=[np.zeros((2, 2, 63))] * 2, layer=0)),
    "one layer's rows for all": ("keys.shape", lambda: append(rows=make_rows(2))),
    "all layers' rows for one": ("keys.shape", lambda: append(rows=make_rows(2, num_layers=LAYERS), layer=0)),
    "wrong number of layers": ("keys.shape", lambda: append(rows=make_rows(2, num_layers=LAYERS + 1))),
    "zero tokens": ("keys.shape", lambda: append(rows=make_rows(0), layer=0)),
    "zero tokens in all layers": ("keys.shape", lambda: append(rows=make_rows(0, num_layers=LAYERS))),
    "values of another length": ("values.shape", lambda: append(rows=[make_rows(2)[0], make_rows(3)[1]], layer=0)),
    "values of another type": (
        "values.data_type",
        lambda: append(rows=[make_rows(2)[0], make_rows(2)[1].astype(np.float16)], layer=0),
    ),
    "no keys": ("keys", lambda: kv_cache_pb2.AppendRequest(sequence_id="live", layer=0)),
    "wrong query heads": ("queries.shape", lambda: attend(queries=np.zeros((1, 2, 64)))),
    "wrong query head dim": ("queries.shape", lambda: attend(queries=np.zeros((1, 4, 128)))),
    "no queries": ("queries.data_type", lambda: kv_cache_pb2.AttendRequest(sequence_ids=["live"])),
    "more queries than asked": ("queries.shape", lambda: attend(queries=make_queries(3), query_lens=[2])),
    "keys without values": ("values", lambda: attend(["empty"], keys=make_rows(1)[0])),
    "values without keys": ("keys", lambda: attend(["empty"], values=make_rows(1)[1])),
    "more keys than queries": ("keys.shape", lambda: attend(["empty"], keys=make_rows(2)[0], values=make_rows(2)[1])),
}
VALUES: dict[str, tuple[str, Make]] = {
    "append to layer -1": ("layer", lambda: append(layer=-1, rows=make_rows(2))),
    "append to a layer beyond": ("layer", lambda: append(layer=LAYERS, rows=make_rows(2))),
    "attend in layer -1": ("layer", lambda: attend(layer=-1)),
    "attend in a layer beyond": ("layer", lambda: attend(layer=LAYERS)),
    "append at a negative position": ("position", lambda: append(position=-1)),
    "attend at a negative position": ("positions[1]", lambda: writing(["empty", "live"], [1, 1], positions=[0, -1])),
    "positions for half the batch": ("positions", lambda: writing(["empty", "live"], [1, 1], positions=[0])),
    "query lengths for half the batch": ("query_lengths", lambda: attend(["live", "big"], query_lens=[2])),
    "negative query length": ("query_lengths[1]", lambda: attend(["live", "big"], query_lens=[3, -1])),
    "KN-31 context beyond what is written": (
        "query_lengths[0]",
        lambda: attend(["uneven"], make_queries(4), query_lens=[4]),
    ),
    "KN-31 context beyond the table": ("query_lengths[0]", lambda: attend(["live"], make_queries(33), query_lens=[33])),
    "KN-31 nothing written in this layer": ("query_lengths[0]", lambda: attend(["uneven"], layer=1)),
    "KN-31 empty sequence": ("query_lengths[1]", lambda: attend(["live", "empty"])),
    "KN-31 NaN query": ("queries.data", lambda: attend(queries=with_nan())),
    "KN-31 NaN query of half precision": ("queries.data", lambda: attend(queries=with_nan().astype(np.float16))),
    "NaN query with new keys": (
        "queries.data",
        lambda: attend(["empty"], with_nan(), keys=make_rows(1)[0], values=make_rows(1)[1]),
    ),
    "NaN scale": ("options.scale", lambda: attend(scale=float("nan"))),
    "infinite scale": ("options.scale", lambda: attend(scale=float("inf"))),
    "window 0": ("options.window", lambda: attend(window=0)),
    "window -1": ("options.window", lambda: attend(window=-1)),
    "soft cap 0": ("options.soft_cap", lambda: attend(soft_cap=0.0)),
    "NaN soft cap": ("options.soft_cap", lambda: attend(soft_cap=float("nan"))),
    "three slopes": ("options.alibi_slopes", lambda: attend(alibi_slopes=[1.0] * 3)),
    "infinite slope": ("options.alibi_slopes[2]", lambda: attend(alibi_slopes=[1.0, 1.0, float("inf"), 1.0])),
    "NaN sink": ("options.sinks[1]", lambda: attend(sinks=[0.0, float("nan"), 0.0, 0.0])),
    "GN-17 negative token id in allocate": ("token_ids[2]", lambda: allocate("new", [1, 2, -3])),
    "GN-17 negative token id in append": ("token_ids[1]", lambda: append("empty", token_ids=[1, -1])),
    "GN-17 negative token id in attend": ("token_ids[0]", lambda: writing(["empty"], [2], token_ids=[-1, 1])),
    "too few token ids": ("token_ids", lambda: append("empty", token_ids=[1])),
    "token ids that contradict known ones": ("token_ids[1]", lambda: append("typed", token_ids=[0, 2])),
    "truncate to more": ("token_count", lambda: kv_cache_pb2.TruncateRequest(sequence_id="live", token_count=21)),
    "truncate to less than nothing": (
        "token_count",
        lambda: kv_cache_pb2.TruncateRequest(sequence_id="live", token_count=-1),
    ),
    "page of -1": ("page_size", lambda: kv_cache_pb2.ListSequencesRequest(page_size=-1)),
    "page of 1001": ("page_size", lambda: kv_cache_pb2.ListSequencesRequest(page_size=1_001)),
    "page token made up": ("page_token", lambda: kv_cache_pb2.ListSequencesRequest(page_token="live")),
}
NON_FINITE: dict[str, tuple[str, Make]] = {
    f"RL-01 {value} as {np.dtype(dtype).name} in {field} by {make.__name__}": (
        f"{field}.data",
        partial(make, field, value, dtype),
    )
    for field in ("keys", "values")
    for value in (np.nan, np.inf, -np.inf)
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16)
    for make in (append_spoiled, attend_spoiled)
}
LIMITS: dict[str, tuple[str, Make]] = {
    "RL-01 infinite query": ("queries.data", lambda: attend(queries=spoiled_queries(np.inf))),
    "RL-01 infinite query of half precision": (
        "queries.data",
        lambda: attend(queries=spoiled_queries(-np.inf).astype(np.float16)),
    ),
    "RL-01 infinite soft cap": ("options.soft_cap", lambda: attend(soft_cap=float("inf"))),
    "RL-01 infinite sink": ("options.sinks[2]", lambda: attend(sinks=[0.0, 0.0, float("-inf"), 0.0])),
    "RL-01 NaN slope": ("options.alibi_slopes[0]", lambda: attend(alibi_slopes=[float("nan"), 0.0, 0.0, 0.0])),
    "RL-02 4,097 ids to free": ("sequence_ids", lambda: free(map(str, range(4_097)))),
    "RL-02 4,097 ids to swap out": (
        "sequence_ids",
        lambda: kv_cache_pb2.SwapOutRequest(sequence_ids=map(str, range(4_097))),
    ),
    "RL-02 4,097 ids to swap in": (
        "sequence_ids",
        lambda: kv_cache_pb2.SwapInRequest(sequence_ids=map(str, range(4_097))),
    ),
    "RL-02 4,097 ids to attend": ("sequence_ids", lambda: attend([str(at) for at in range(4_097)], make_queries(1))),
    "RL-02 300,000 ids to free": ("request", lambda: free(f"sequence-{at}" for at in range(300_000))),
    "RL-02 3M token ids": ("request", lambda: allocate("new", np.zeros(3_000_000, np.int32))),
    "RL-02 500,000 slopes": ("options.alibi_slopes", lambda: attend_with(alibi_slopes=np.ones(500_000))),
    "RL-02 500,000 sinks": ("options.sinks", lambda: attend_with(sinks=np.ones(500_000))),
    "RL-02 1M query lengths": ("query_lengths", lambda: attend_with(query_lengths=np.ones(1_000_000, np.int64))),
    "RL-02 1M token ids without keys": ("request", lambda: attend_with(token_ids=np.full(1_000_000, 2**20))),
    "RL-02 2,000 extents": (
        "keys.shape",
        lambda: append_tensor(data_type=FLOAT32, shape=[1] * 2_000, data=bytes(4)),
    ),
    "RL-03 salt of 1,025 bytes": (
        "salt",
        lambda: kv_cache_pb2.AllocateRequest(sequence_id="new", salt=bytes(1_025)),
    ),
    "RL-03 request id of 257 characters": (
        "request_id",
        lambda: kv_cache_pb2.AllocateRequest(sequence_id="new", request_id="x" * 257),
    ),
    "RL-03 request id of a fork of 257 characters": (
        "request_id",
        lambda: kv_cache_pb2.ForkRequest(parent_id="live", child_id="new", request_id="x" * 257),
    ),
    "RL-02 page token of 65 characters": ("page_token", lambda: kv_cache_pb2.ListSequencesRequest(page_token="1" * 65)),
    "RL-02 id of 257 characters to append to": ("sequence_id", lambda: append("x" * 257)),
    "RL-02 id of 257 characters to attend to": ("sequence_ids[1]", lambda: attend(["live", "x" * 257])),
    "RL-02 id of 257 characters to free": ("sequence_ids[0]", lambda: free(["x" * 257])),
    "RL-02 id of 257 characters to truncate": (
        "sequence_id",
        lambda: kv_cache_pb2.TruncateRequest(sequence_id="x" * 257),
    ),
    "RL-02 parent id of 257 characters": (
        "parent_id",
        lambda: kv_cache_pb2.ForkRequest(parent_id="x" * 257, child_id="new"),
    ),
    "RL-02 child id of 257 characters": (
        "child_id",
        lambda: kv_cache_pb2.ForkRequest(parent_id="live", child_id="x" * 257),
    ),
}
NAMES: dict[str, tuple[str, Make]] = {
    "no id": ("sequence_id", lambda: allocate("")),
    "id of 257 characters": ("sequence_id", lambda: allocate("x" * 257)),
    "id of 100,000 characters": ("sequence_id", lambda: allocate("\u20ac" * 100_000)),
    "describe an id of 100,000 digits": (
        "sequence_id",
        lambda: kv_cache_pb2.GetSequenceRequest(sequence_id="1" * 100_000),
    ),
    "allocate an engine's id": ("sequence_id", lambda: allocate("~gen-0")),
    "append to an engine's id": ("sequence_id", lambda: append("~gen-0")),
    "attend to an engine's id": ("sequence_ids[1]", lambda: attend(["live", "~gen-0"])),
    "truncate an engine's id": ("sequence_id", lambda: kv_cache_pb2.TruncateRequest(sequence_id="~gen-0")),
    "free an engine's id": ("sequence_ids[0]", lambda: kv_cache_pb2.FreeRequest(sequence_ids=["~gen-0"])),
    "fork an engine's id": ("parent_id", lambda: kv_cache_pb2.ForkRequest(parent_id="~gen-0", child_id="new")),
    "fork into an engine's id": ("child_id", lambda: kv_cache_pb2.ForkRequest(parent_id="live", child_id="~gen-0")),
    "fork into no id": ("child_id", lambda: kv_cache_pb2.ForkRequest(parent_id="live")),
    "attend to nobody": ("sequence_ids", lambda: attend([])),
    "attend twice to one": ("sequence_ids[1]", lambda: attend(["live", "live"])),
    "write twice to one": ("sequence_ids[2]", lambda: writing(["live", "empty", "live"], [1, 1, 1])),
    "free nobody": ("sequence_ids", lambda: kv_cache_pb2.FreeRequest()),
    "BA-03 free one twice": (
        "sequence_ids[2]",
        lambda: kv_cache_pb2.FreeRequest(sequence_ids=["live", "big", "live"]),
    ),
}
OTHERS: dict[str, tuple[type[errors.PagedKvError], dict[str, int], Make]] = {
    "append to an unknown id": (errors.SequenceNotFound, {}, lambda: append("nobody")),
    "attend to one unknown id": (errors.SequenceNotFound, {}, lambda: attend(["live", "nobody"])),
    "write to one unknown id": (errors.SequenceNotFound, {}, lambda: writing(["empty", "nobody"], [1, 1])),
    "free one unknown id": (
        errors.SequenceNotFound,
        {},
        lambda: kv_cache_pb2.FreeRequest(sequence_ids=["live", "nobody"]),
    ),
    "unknown id like a figure": (
        errors.SequenceNotFound,
        {},
        lambda: kv_cache_pb2.TruncateRequest(sequence_id="\u00b2"),
    ),
    "BA-09 allocate an id again": (errors.SequenceExists, {}, lambda: allocate("live")),
    "fork into a live id": (
        errors.SequenceExists,
        {},
        lambda: kv_cache_pb2.ForkRequest(parent_id="live", child_id="big"),
    ),
    "fork while the layers differ": (
        errors.PositionMismatch,
        {},
        lambda: kv_cache_pb2.ForkRequest(parent_id="uneven", child_id="new"),
    ),
    "append all layers while they differ": (errors.PositionMismatch, {}, lambda: append("uneven")),
    "append after a gap": (errors.PositionMismatch, {"position": 21, "expected": 20}, lambda: append(position=21)),
    "append over a part": (errors.PositionMismatch, {"position": 19, "expected": 20}, lambda: append(position=19)),
    "one gap in a batch": (
        errors.PositionMismatch,
        {"position": 2**63 - 1, "expected": 20},
        lambda: writing(["empty", "live"], [1, 1], positions=[0, 2**63 - 1]),
    ),
    "a prompt beyond the limit": (
        errors.SequenceTooLong,
        {"num_tokens": 513, "limit": 512},
        lambda: allocate("new", list(range(513))),
    ),
    "append beyond the limit": (
        errors.SequenceTooLong,
        {"num_tokens": 513, "limit": 512},
        lambda: append("big", make_rows(33, num_layers=LAYERS)),
    ),
    "one of a batch beyond the limit": (
        errors.SequenceTooLong,
        {"num_tokens": 513, "limit": 512},
        lambda: writing(["empty", "big"], [1, 33]),
    ),
    "append more than is free": (
        errors.OutOfBlocks,
        {"needed": 32, "free": 31, "evictable": 0, "total": 64},
        lambda: append("empty", make_rows(512, num_layers=LAYERS)),
    ),
    "a batch of more than is free": (
        errors.OutOfBlocks,
        {"needed": 32, "free": 31, "total": 64},
        lambda: writing(["empty", "typed"], [480, 17]),
    ),
}


def allocate(name: str, token_ids: Any = None) -> Any:
    return kv_cache_pb2.AllocateRequest(sequence_id=name, token_ids=token_ids)


def free(names: Iterable[str]) -> Any:
    return kv_cache_pb2.FreeRequest(sequence_ids=names)


def method_of(request: Any) -> str:
    return type(request).__name__.removesuffix("Request")


def state_of(client: Client) -> tuple[Any, ...]:
    names = [sequence.sequence_id for sequence in client.sequences()]
    return client.usage(), client.audit(), [client.sequence(name) for name in names]


def refuse(prepared: Client, stub: Any, request: Any) -> tuple[errors.PagedKvError, list[Any]]:
    """Send a request that must fail; returns its exception and its status details, nothing having changed."""
    before = state_of(prepared)
    with pytest.raises(grpc.RpcError) as caught:
        getattr(stub, method_of(request))(request, timeout=600)
    assert state_of(prepared) == before
    assert before[1].ok
    status: Any = rpc_status.from_call(caught.value)
    infos = [detail for detail in status.details if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)]
    error = to_exception(caught.value)
    assert len(infos) == 1
    info = error_details_pb2.ErrorInfo.FromString(infos[0].value)
    assert (info.domain, info.reason) == ("pagedkv", type(error).reason)
    return error, list(status.details)


INVALID = {**SHAPES, **VALUES, **NAMES, **NON_FINITE, **LIMITS}


@pytest.mark.parametrize("case", INVALID)
def test_bad_request_is_refused_by_field_and_changes_nothing(prepared, stub, case):
    field, make = INVALID[case]
    error, details = refuse(prepared, stub, make())
    assert type(error) is errors.InvalidArgument
    assert error.field == field
    violations = [
        error_details_pb2.BadRequest.FromString(detail.value).field_violations
        for detail in details
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR)
    ]
    assert [[violation.field for violation in found] for found in violations] == [[field]]


@pytest.mark.parametrize("case", OTHERS)
def test_refused_request_names_its_figures_and_changes_nothing(prepared, stub, case):
    kind, figures, make = OTHERS[case]
    error, _ = refuse(prepared, stub, make())
    assert type(error) is kind
    assert {name: getattr(error, name) for name in figures} == figures


def test_out_of_blocks_says_when_to_retry(prepared, stub):
    _, details = refuse(prepared, stub, append("empty", make_rows(512, num_layers=LAYERS)))
    delays = [
        error_details_pb2.RetryInfo.FromString(detail.value).retry_delay.seconds
        for detail in details
        if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR)
    ]
    assert delays == [1]


@pytest.mark.parametrize("token_id", [2**31, 2**62, -(2**31) - 1])
def test_token_id_beyond_32_bits_is_refused_by_the_client_gn_17(prepared, token_id):
    before = state_of(prepared)
    for call in (
        lambda: prepared.allocate("new", [5, token_id]),
        lambda: prepared.append("empty", *make_rows(2), layer=0, token_ids=[5, token_id]),
    ):
        with pytest.raises(errors.InvalidArgument) as caught:
            call()
        assert caught.value.field == "token_ids[1]"
    assert state_of(prepared) == before


def test_integer_rows_are_refused_by_the_client(prepared):
    with pytest.raises(errors.InvalidArgument) as caught:
        prepared.append("live", np.zeros((1, 2, 64), np.int8), np.zeros((1, 2, 64), np.int8), layer=0)
    assert caught.value.field == "keys.data_type"


@pytest.mark.parametrize("case", LIMITS)
def test_refusal_of_what_is_too_large_names_the_limit_and_not_the_value(prepared, stub, case):
    error, _ = refuse(prepared, stub, LIMITS[case][1]())
    assert len(str(error)) < 200
    assert "RL-01" in case or error.limit


@pytest.mark.parametrize(("layer", "index"), [(None, (1, 2, 1, 7)), (0, (2, 1, 63))])
@pytest.mark.parametrize("field", ["keys", "values"])
def test_rl01_refused_rows_are_named_by_field_index_and_value(prepared, stub, field, layer, index):
    rows = dict(zip(("keys", "values"), make_rows(3, num_layers=LAYERS if layer is None else None), strict=True))
    rows[field][index] = -np.inf
    error, _ = refuse(prepared, stub, append("empty", list(rows.values()), **({} if layer is None else {"layer": 0})))
    assert (error.field, error.index, error.value) == (f"{field}.data", str(list(index)), "-inf")


def send_step(stub: Any, request: Any) -> None:
    list(stub.Step(iter([request]), timeout=600))


@pytest.mark.parametrize("field", ["queries", "keys", "values"])
def test_rl01_rows_that_are_not_finite_are_refused_in_a_step_too(prepared, stub, field):
    request = attend_spoiled("keys", 0.0)
    spoil = np.frombuffer(getattr(request, field).data, np.float32).copy()
    spoil[-1] = np.nan
    getattr(request, field).data = spoil.tobytes()
    before = state_of(prepared)
    with pytest.raises(grpc.RpcError) as caught:
        send_step(stub, request)
    assert to_exception(caught.value).field == f"{field}.data"
    assert state_of(prepared) == before
