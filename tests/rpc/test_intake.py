"""From bytes to messages: what is cut out of large ones, and what is refused before it is parsed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.server import SHAPE
from helpers.wire import make_queries, make_rows
from pagedkv.client.asynchronous import make_attend_request
from pagedkv.client.tensors import to_array, to_tensor
from pagedkv.errors import InvalidArgument
from pagedkv.rpc.convert import attend_answer_bytes, to_attend_answer
from pagedkv.rpc.intake import parse_tensors, parser_of
from pagedkv.rpc.limits import MAX_FIELDS, MAX_GENERATION_BYTES, MAX_PLAIN_BYTES, MAX_SMALL_BYTES
from pagedkv.v1 import kv_cache_pb2, tensor_pb2

LARGE, SMALL = 2**17, 16  # bytes of elements that are cut out, that stay
KIND = kv_cache_pb2.AttendRequest


def make_request(sizes=(LARGE, LARGE, LARGE)):
    tensors = {
        name: tensor_pb2.Tensor(data_type=1, shape=[size], data=bytes([at + 1]) * size) if size else None
        for at, (name, size) in enumerate(zip(("queries", "keys", "values"), sizes, strict=True))
    }
    return KIND(sequence_ids=["a", "b"], layer=3, query_lengths=[1, 2], positions=[7], **tensors)


def whole(arrived):
    """Put the elements back into the message."""
    message = KIND()
    message.CopyFrom(arrived.message)
    for name, elements in arrived.elements.items():
        getattr(message, name).data = bytes(elements)
    return message


@given(st.tuples(*[st.sampled_from([0, SMALL, LARGE])] * 3))
def test_message_is_the_same_whether_its_elements_are_cut_out_or_not(sizes):
    request = make_request(sizes)
    arrived = parse_tensors(request.SerializeToString(), KIND)
    assert whole(arrived) == request


def test_elements_of_large_tensors_are_not_copied():
    data = make_request().SerializeToString()
    arrived = parse_tensors(data, KIND)
    assert set(arrived.elements) == {"queries", "keys", "values"}
    assert all(elements.obj is data for elements in arrived.elements.values())
    assert arrived.message.ByteSize() < 100


@given(st.integers(0, 4 * LARGE), st.binary(max_size=12))
def test_large_message_that_is_cut_short_or_damaged_is_read_as_the_parser_reads_it(at, junk):
    data = make_request().SerializeToString()
    damaged = data[:at] + junk + data[at + len(junk) :] if junk else data[:at]
    try:
        expected = KIND.FromString(damaged)
    except Exception:
        with pytest.raises(InvalidArgument) as caught:
            parse_tensors(damaged, KIND)
        assert caught.value.field == "request"
        return
    try:
        arrived = parse_tensors(damaged, KIND)
    except InvalidArgument:
        return  # what the parser lets pass may have been cut into pieces that are no fields
    assert whole(arrived).SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)


def test_parts_of_one_tensor_are_joined_and_its_last_elements_count():
    first, second = (KIND(keys=tensor_pb2.Tensor(shape=[size], data=bytes([size]) * LARGE)) for size in (1, 2))
    data = first.SerializeToString() + second.SerializeToString()
    assert whole(parse_tensors(data, KIND)) == KIND.FromString(data)


@pytest.mark.parametrize(
    ("method", "limit"),
    [
        ("/pagedkv.v1.KvCache/Free", MAX_PLAIN_BYTES),
        ("/pagedkv.v1.KvCache/Append", MAX_PLAIN_BYTES),
        ("/pagedkv.v1.KvCache/Step", MAX_PLAIN_BYTES),
        ("/pagedkv.v1.Generation/Tokenize", MAX_GENERATION_BYTES),
        ("/grpc.health.v1.Health/Check", MAX_SMALL_BYTES),
    ],
)
def test_rl02_request_is_refused_by_its_size_before_it_is_parsed(method, limit):
    def parse(data):
        raise AssertionError("parsed")

    with pytest.raises(InvalidArgument) as caught:
        parser_of(method, parse)(b"\x7a\x80\x80\x80\x02" + bytes(2**22))  # one field, which no message has
    assert caught.value.field == "request"
    assert caught.value.details["limit"] == str(limit)


@pytest.mark.parametrize("field", [b"\x0a\x00", b"\x12\x00", b"\xf8\x07\x01"], ids=["ids", "tensors", "unknown"])
def test_rl02_message_of_countless_fields_is_refused_before_they_are_parsed(field):
    with pytest.raises(InvalidArgument, match="fields") as caught:
        parse_tensors(field * 200_000, KIND)
    assert caught.value.details["limit"] == str(MAX_FIELDS)


@given(st.integers(0, 40), st.floats(0, 10))
def test_answer_is_the_message_byte_for_byte_and_its_size_is_known_before(num_queries, seconds):
    output = make_queries(num_queries)
    lse = output[:, :, 0].copy()
    data = to_attend_answer(output, lse, seconds)
    expected = kv_cache_pb2.AttendResponse(
        output=to_tensor(output, ""), lse=to_tensor(lse, ""), compute_seconds=seconds
    )
    assert kv_cache_pb2.AttendResponse.FromString(data) == expected
    assert np.array_equal(to_array(kv_cache_pb2.AttendResponse.FromString(data).output), output)
    assert len(data) <= attend_answer_bytes(num_queries, SHAPE) <= len(data) + 256


def test_large_attend_request_of_the_client_is_read_whole():
    keys, values = make_rows(400)
    request = make_attend_request(["a"], make_queries(400), layer=1, query_lens=[400], keys=keys, values=values)
    arrived = parse_tensors(request.SerializeToString(), KIND)
    assert whole(arrived) == request
