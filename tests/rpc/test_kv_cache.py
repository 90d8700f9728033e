"""The cache service over the wire: what each call does to the pool and what it answers."""

import threading

import grpc
import numpy as np
import pytest

from helpers.server import SHAPE
from helpers.wire import assert_attention, make_queries, make_rows
from pagedkv.errors import InvalidArgument, PositionMismatch, SequenceExists, SequenceNotFound, TransportError
from pagedkv.v1 import kv_cache_pb2, kv_cache_pb2_grpc

LAYERS = SHAPE.num_layers


def fill(client, name, num_tokens, seed=0, **options):
    """Allocate a sequence and write all its layers; returns K and V [num_layers, num_tokens, ...]."""
    keys, values = make_rows(num_tokens, seed, num_layers=LAYERS)
    client.allocate(name, **({"token_ids": options["token_ids"]} if "token_ids" in options else {}))
    client.append(name, keys, values, **options)
    return keys, values


def test_info_describes_the_pool(client, backend):
    info = client.info()
    assert (info.num_blocks, info.block_size, info.backend, info.max_sequence_tokens) == (64, 16, backend, 512)
    assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (2, 4, 2, 64)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 50])
def test_attend_after_append_equals_the_oracle_in_every_layer(client, name, num_tokens):
    keys, values = fill(client, name, num_tokens, num_tokens)
    queries = make_queries(min(num_tokens, 3))
    for layer in range(LAYERS):
        result = client.attend([name], queries, layer=layer, query_lens=[len(queries)])
        assert_attention(result, queries, [keys[layer]], [values[layer]], [len(queries)])
        assert result.compute_seconds > 0


def test_attend_with_options_equals_the_oracle(client, name):
    keys, values = fill(client, name, 40)
    queries = make_queries(2)
    options = {
        "scale": 0.2,
        "window": 17,
        "soft_cap": 5.0,
        "alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32),
        "sinks": np.array([0.1, -1.0, 0.0, 2.0], np.float32),
    }
    result = client.attend([name], queries, layer=1, query_lens=[2], **options)
    assert_attention(result, queries, [keys[1]], [values[1]], [2], **options)


def test_attend_over_a_ragged_batch_keeps_the_order_of_its_sequences(client, name):
    names = [f"{name}-{index}" for index in range(3)]
    rows = [fill(client, sequence, length, length) for sequence, length in zip(names, (5, 16, 33), strict=True)]
    queries = make_queries(5)
    result = client.attend(names[::-1], queries, layer=0, query_lens=[4, 0, 1])
    keys, values = [k[0] for k, _ in rows[::-1]], [v[0] for _, v in rows[::-1]]
    assert_attention(result, queries, keys, values, [4, 0, 1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_rows_of_other_float_types_are_accepted(client, name, dtype):
    kind = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    keys, values = (rows.astype(kind) for rows in make_rows(9))
    queries = make_queries(1).astype(kind)
    client.allocate(name)
    client.append(name, keys, values, layer=0)
    assert_attention(client.attend([name], queries, layer=0), queries, [keys], [values], [1])


def test_attend_with_keys_writes_them_first(client, name):
    client.allocate(name)
    keys, values = make_rows(20)
    for start, end in ((0, 7), (7, 8), (8, 20)):
        queries = make_queries(end - start, start)
        rows = {"keys": keys[start:end], "values": values[start:end]}
        result = client.attend([name], queries, layer=0, query_lens=[end - start], positions=[start], **rows)
        assert_attention(result, queries, [keys[:end]], [values[:end]], [end - start])
    assert client.sequence(name).layer_lengths == (20, 0)


def test_attend_with_keys_repeated_answers_the_same_and_writes_nothing(client, name):
    client.allocate(name)
    keys, values = make_rows(5)
    queries = make_queries(5)
    call = {"layer": 0, "query_lens": [5], "positions": [0], "keys": keys, "values": values}
    first = client.attend([name], queries, **call)
    again = client.attend([name], queries, **{**call, "keys": keys * 0})
    assert np.array_equal(first.output, again.output)
    assert client.sequence(name).layer_lengths == (5, 0)


def test_attend_repeated_after_newer_tokens_sees_none_of_them(client, name):
    client.allocate(name)
    keys, values = make_rows(6)
    call = {"layer": 0, "query_lens": [5], "positions": [0], "keys": keys[:5], "values": values[:5]}
    first = client.attend([name], make_queries(5), **call)
    client.append(name, keys[5:], values[5:], layer=0)
    assert np.array_equal(first.output, client.attend([name], make_queries(5), **call).output)


def test_attend_with_keys_over_some_retried_and_some_new_sequences(client, name):
    names = [f"{name}-a", f"{name}-b"]
    rows = [make_rows(4, seed) for seed in (1, 2)]
    for sequence in names:
        client.allocate(sequence)
    client.append(names[0], *rows[0], layer=0)
    keys, values = (np.concatenate([pair[side] for pair in rows]) for side in (0, 1))
    queries = make_queries(8)
    call = {"layer": 0, "query_lens": [4, 4], "positions": [0, 0], "keys": keys, "values": values}
    result = client.attend(names, queries, **call)
    assert_attention(result, queries, [k for k, _ in rows], [v for _, v in rows], [4, 4])


def test_append_repeated_by_position_does_nothing(client, name):
    keys, values = make_rows(10)
    client.allocate(name)
    assert client.append(name, keys, values, layer=0, position=0) == 10
    assert client.append(name, keys * 0, values, layer=0, position=0) == 10
    assert client.append(name, keys[3:7] * 0, values[3:7], layer=0, position=3) == 10
    queries = make_queries(1)
    assert_attention(client.attend([name], queries, layer=0), queries, [keys], [values], [1])


@pytest.mark.parametrize("position", [9, 11, 2**62])
def test_append_with_a_gap_or_a_part_overlap_is_refused(client, name, position):
    client.allocate(name)
    client.append(name, *make_rows(10), layer=0)
    with pytest.raises(PositionMismatch) as caught:
        client.append(name, *make_rows(4), layer=0, position=position)
    assert (caught.value.position, caught.value.expected) == (position, 10)
    assert client.sequence(name).layer_lengths == (10, 0)


def test_append_over_all_layers_while_they_differ_is_refused(client, name):
    client.allocate(name)
    client.append(name, *make_rows(3), layer=1)
    with pytest.raises(PositionMismatch):
        client.append(name, *make_rows(2, num_layers=LAYERS))


def test_allocate_of_a_cached_prompt_finds_its_full_blocks(client, name):
    token_ids = list(range(1_000, 1_040))
    keys, values = fill(client, f"{name}-a", 40, token_ids=token_ids)
    assert client.allocate(f"{name}-b", token_ids).num_cached_tokens == 32
    assert client.allocate(f"{name}-c", token_ids, salt=b"other").num_cached_tokens == 0
    assert client.allocate(f"{name}-d", token_ids, salt=b"").num_cached_tokens == 0
    queries = make_queries(1)
    result = client.attend([f"{name}-b"], queries, layer=1)
    assert_attention(result, queries, [keys[1, :32]], [values[1, :32]], [1])


def test_fork_then_writes_of_both_leave_each_its_own_tokens(client, name):
    keys, values = fill(client, name, 20)
    assert client.fork(name, f"{name}-child") == 20
    assert client.sequence(name).block_table == client.sequence(f"{name}-child").block_table
    own = {name: make_rows(5, 7, num_layers=LAYERS), f"{name}-child": make_rows(5, 8, num_layers=LAYERS)}
    for sequence, rows in own.items():
        client.append(sequence, *rows)
    for sequence, (more_keys, more_values) in own.items():
        queries = make_queries(5)
        for layer in range(LAYERS):
            full = (
                [np.concatenate([keys[layer], more_keys[layer]])],
                [np.concatenate([values[layer], more_values[layer]])],
            )
            assert_attention(client.attend([sequence], queries, layer=layer, query_lens=[5]), queries, *full, [5])
    usage = client.usage()
    assert (usage.shared, usage.private, usage.num_tokens) == (1, 2, 16 + 9 + 9)


def test_truncate_then_append_continues_at_the_cut(client, name):
    keys, values = fill(client, name, 30)
    client.truncate(name, 13)
    more_keys, more_values = make_rows(4, 9, num_layers=LAYERS)
    assert client.append(name, more_keys, more_values, position=13) == 17
    queries = make_queries(2)
    full = [np.concatenate([keys[0, :13], more_keys[0]])], [np.concatenate([values[0, :13], more_values[0]])]
    assert_attention(client.attend([name], queries, layer=0, query_lens=[2]), queries, *full, [2])


def test_free_gives_every_block_back(client, name):
    fill(client, f"{name}-a", 100)
    fill(client, f"{name}-b", 1)
    assert client.usage().private == 8
    client.free([f"{name}-a", f"{name}-b"])
    usage = client.usage()
    assert usage.free + usage.cached == usage.total
    with pytest.raises(SequenceNotFound):
        client.sequence(f"{name}-a")


def test_usage_states_sum_to_the_total(client, name):
    fill(client, name, 33, token_ids=list(range(33)))
    client.fork(name, f"{name}-child")
    usage = client.usage()
    states = (usage.free, usage.cached, usage.private, usage.shared, usage.pinned, usage.in_flight)
    assert sum(states) == usage.total == 64
    assert (usage.shared, usage.num_tokens) == (3, 33)


def test_sequences_are_listed_the_oldest_first(client, name):
    for index in range(3):
        client.allocate(f"{name}-{index}")
    assert [sequence.sequence_id for sequence in client.sequences()] == [f"{name}-{index}" for index in range(3)]


def test_step_answers_like_attend_in_order(client, name):
    client.allocate(name)
    keys, values = make_rows(12, num_layers=LAYERS)
    with client.step() as step:
        for position in range(12):
            for layer in range(LAYERS):
                queries = make_queries(1, position)
                new = {"keys": keys[layer, position, None], "values": values[layer, position, None]}
                result = step.attend([name], queries, layer=layer, positions=[position], **new)
                end = position + 1
                assert_attention(result, queries, [keys[layer, :end]], [values[layer, :end]], [1])
    assert client.sequence(name).num_tokens == 12


def test_step_after_an_error_names_the_error_and_then_the_end(client, name):
    with client.step() as step:
        with pytest.raises(SequenceNotFound):
            step.attend([name], make_queries(1), layer=0)
        with pytest.raises(TransportError, match="NOT_FOUND"):
            step.attend([name], make_queries(1), layer=0)


def test_request_id_makes_a_retry_answer_the_same(client, name):
    token_ids = list(range(2_000, 2_033))
    fill(client, f"{name}-filler", 33, token_ids=token_ids)
    for _ in range(2):
        assert client.allocate(name, token_ids, request_id=f"{name}-1").num_cached_tokens == 32
        assert client.fork(name, f"{name}-child", request_id=f"{name}-2") == 32
    assert len(client.sequences()) == 3


def test_request_id_with_other_content_is_refused(client, name):
    client.allocate(name, request_id=f"{name}-1")
    with pytest.raises(InvalidArgument) as caught:
        client.allocate(f"{name}-other", request_id=f"{name}-1")
    assert caught.value.field == "request_id"


def test_request_id_of_a_failed_call_is_free_again(client, name):
    with pytest.raises(SequenceNotFound):
        client.fork(name, f"{name}-child", request_id=f"{name}-1")
    client.allocate(name)
    assert client.fork(name, f"{name}-child", request_id=f"{name}-1") == 0
    with pytest.raises(SequenceExists):
        client.fork(name, f"{name}-child")


def test_append_whose_caller_has_gone_is_written_all_the_same(client, served, name):
    """A deadline that passes while the device is busy must not leave committed tokens without K and V."""
    keys, values = make_rows(20)
    client.allocate(name)
    busy = threading.Event()
    served.backend.submit(lambda: busy.wait(60))
    with type(client)(served.address, timeout=0.2) as hasty, pytest.raises(TransportError, match="DEADLINE"):
        hasty.append(name, keys, values, layer=0, position=0)
    busy.set()
    assert client.append(name, keys, values, layer=0, position=0) == 20
    queries = make_queries(1)
    assert_attention(client.attend([name], queries, layer=0), queries, [keys], [values], [1])


async def test_pages_go_on_though_the_last_one_listed_is_gone(client, served, name):
    for index in range(5):
        client.allocate(f"{name}-{index}")
    async with grpc.aio.insecure_channel(served.address) as channel:
        stub = kv_cache_pb2_grpc.KvCacheStub(channel)
        first = await stub.ListSequences(kv_cache_pb2.ListSequencesRequest(page_size=2))
        client.free(f"{name}-1")
        token = first.next_page_token
        rest = await stub.ListSequences(kv_cache_pb2.ListSequencesRequest(page_size=3, page_token=token))
    listed = [sequence.sequence_id for page in (first, rest) for sequence in page.sequences]
    assert listed == [f"{name}-{index}" for index in range(5)]
    assert rest.next_page_token == ""
