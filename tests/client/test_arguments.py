"""NC-12: whatever a caller gives, it is sent as it was meant or refused by name, before anything is sent.

Methods and parameters are found by introspection: one that is new has no entry in the tables here, which is an error.
"""

import asyncio
import contextlib
import inspect
import math
import subprocess
import sys
import typing
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.client import AsyncClient, AsyncStep, Client, Step
from pagedkv.client.requests import generate_request, make_attend_request
from pagedkv.errors import InvalidArgument

NAN, INF = float("nan"), float("inf")
ROWS = np.zeros((1, 1, 1), np.float32)


class Unreadable:
    """An array that cannot be had."""

    def __array__(self, *args, **kwargs):
        raise RuntimeError("no such memory")


NO_TEXT = [b"a", 5, 1.5, True, ["a"], "a\ud800", "\udfff", {"a": "b"}, object()]
NO_INTEGER = [1.0, "1", b"1", True, np.True_, NAN, [1], np.array([1, 2]), 1j, object(), 2**70, -(2**70), 10**5000]
NO_NUMBER = ["1", b"1", True, np.False_, [1.0], np.ones(1), 1j, np.complex64(1), NAN, object(), 10**400, "x" * 10**6]
NO_SEQUENCE = [5, 1.5, True, object(), b"ab", {1: 2}, {1}, np.array(1)]
NO_IDS = [*NO_SEQUENCE, "12", [-1], [1, 2**31], [2**70], [10**5000], [1.0], [True], [None], ["1"], np.ones(2), [[1]]]
NO_POSITIONS = [*NO_SEQUENCE, "12", [-1], [2**63], [1.5], [None], np.ones((1, 1), int)]
NO_FLOATS = [*NO_SEQUENCE, "12", [NAN], [1.0, INF], [1e39], ["1"], [None], [1j], np.array([NAN]), np.ones((1, 1))]
NO_BYTES = ["a", 5, True, ["a"], [1], np.ones(1, np.uint8), object()]
NO_FLAG = [0, 1, "yes", None, [], 1.0, object()]
NO_TENSOR = ["a", b"ab", 5, True, object(), ["a"], [[1.0], [1.0, 2.0]], {"a": 1}, np.ones(2, int), np.ones(2, complex)]
NO_TENSOR += [np.ones(2, bool), np.array([1e300]), np.array([None]), np.ma.masked_array(ROWS), Unreadable(), type]
NO_CHAT = [[], "user: a", [5], [None], {"role": "user"}, [{}], [{"role": "user"}], [{"role": 5, "content": "a"}]]

REFUSED = {
    "target": [*NO_TEXT, None, "", "host", ":1", "host:", "host:x", "host:65536", "host:0", "http://host:1", "::1:5"],
    "timeout": [*NO_NUMBER, INF, -INF, 1e300],
    "max_message_bytes": [*NO_INTEGER, None, 0, -1, 2**31],
    "sequence_id": [*NO_TEXT, None],
    "parent_id": [*NO_TEXT, None],
    "child_id": [*NO_TEXT, None],
    "request_id": [*NO_TEXT, None],
    "text": [*NO_TEXT, None],
    "sequence_ids": [*NO_SEQUENCE, None, "\ud800", [None], [b"a"], ["a", "\udc80"], [["a"]]],
    "token_ids": NO_IDS,
    "query_lens": NO_IDS,
    "positions": NO_POSITIONS,
    "stop_token_ids": [*NO_IDS, None],
    "salt": NO_BYTES,
    "layer": [*NO_INTEGER, -1, 2**31],
    "position": [*NO_INTEGER, -1, 2**63],
    "num_tokens": [*NO_INTEGER, None, -1, 2**63],
    "window": [*NO_INTEGER, 0, -1, 2**31],
    "scale": [*NO_NUMBER, INF, 1e39],
    "soft_cap": [*NO_NUMBER, INF, 0, -1.0, 1e-60],
    "alibi_slopes": NO_FLOATS,
    "sinks": NO_FLOATS,
    "keys": NO_TENSOR,
    "values": NO_TENSOR,
    "queries": [*NO_TENSOR, None],
    "prompt": NO_TEXT,
    "messages": [*NO_CHAT, [{"role": "user", "content": "a", "name": "b"}], [{"role": "user", "content": None}]],
    "max_tokens": [*NO_INTEGER, 0, -5, 2**40],
    "temperature": [*NO_NUMBER, INF, -0.1],
    "top_k": [*NO_INTEGER, None, -1, 2**31],
    "top_p": [*NO_NUMBER, 0, 1.1, -1],
    "seed": [*NO_INTEGER, -1, 2**64],
    "stop": [*NO_SEQUENCE, None, [None], [b"a"], ["\ud800"]],
    "ignore_eos": NO_FLAG,
    "add_special": NO_FLAG,
    "parse_special": NO_FLAG,
    "skip_special": NO_FLAG,
    "continue_final_message": NO_FLAG,
}
REFUSED_IN = {  # where None is no value, though it is one elsewhere
    ("attend", "layer"): [None],
    ("append", "keys"): [None],
    ("append", "values"): [None],
    ("detokenize", "token_ids"): [None],
}
NEEDED = {
    "target": "127.0.0.1:1",
    "sequence_id": "a",
    "parent_id": "a",
    "child_id": "b",
    "text": "a",
    "sequence_ids": ["a"],
    "token_ids": [1],
    "num_tokens": 1,
    "keys": ROWS,
    "values": ROWS,
    "queries": ROWS,
    "layer": 0,
}


class Sent(Exception):
    """Something would have gone over the wire."""


def send(*args, **options):
    raise Sent


class Call:
    """A stream's call that sends nothing."""

    write = staticmethod(send)

    def cancel(self):
        pass


def parameters(function):
    """Return the names of all parameters, those of an unpacked TypedDict too, and which of them are needed."""
    found = {}
    for name, parameter in list(inspect.signature(function).parameters.items())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            hints = typing.get_type_hints(inspect.unwrap(function), include_extras=True)
            (options,) = typing.get_args(hints[name])
            found |= dict.fromkeys(options.__annotations__, False)
        else:
            found[name] = parameter.default is parameter.empty
    return found


def methods(kind):
    names = [name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")]
    return ["__init__", *names] if kind in (AsyncClient, Client) else names


EVERY_PARAMETER = [
    (kind, method, name)
    for kind in (AsyncClient, Client, AsyncStep, Step)
    for method in methods(kind)
    for name in parameters(getattr(kind, method))
]


def make(kind):
    if kind is AsyncClient:
        return AsyncClient("127.0.0.1:1")
    if kind is Client:
        return Client("127.0.0.1:1")
    step = AsyncStep(Call(), lambda call: call)
    return step if kind is AsyncStep else Step(step, asyncio.run)


async def call_asyncio(kind, method, arguments):
    if method == "__init__":
        await kind(**arguments).close()
        return
    behind = make(kind)
    try:
        called = getattr(behind, method)(**arguments)
        await (anext(called) if inspect.isasyncgen(called) else called)
    finally:
        await behind.close()


def call_blocking(kind, method, arguments):
    if method == "__init__":
        kind(**arguments).close()
        return
    behind = make(kind)
    try:
        called = getattr(behind, method)(**arguments)
        if inspect.isgenerator(called):
            next(called)
    finally:
        behind.close()


def call(kind, method, **given):
    """Call a method with what it needs and what is given; raises Sent where it was content."""
    needed = {name for name, is_needed in parameters(getattr(kind, method)).items() if is_needed}
    if method == "generate" and not {"prompt", "token_ids", "messages"} & set(given):
        given["prompt"] = "a"
    arguments = {name: NEEDED[name] for name in needed} | given
    if kind in (AsyncClient, AsyncStep):
        asyncio.run(call_asyncio(kind, method, arguments))
    else:
        call_blocking(kind, method, arguments)


@pytest.fixture(autouse=True, scope="module")
def nothing_sent():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncClient, "_open", send)
        yield


def test_nc12_every_parameter_of_every_method_is_in_the_table():
    assert {name for _, _, name in EVERY_PARAMETER} == set(REFUSED)
    assert {method for _, method, _ in EVERY_PARAMETER} >= {"__init__", "allocate", "append", "attend", "generate"}
    for asynchronous, blocking in ((AsyncClient, Client), (AsyncStep, Step)):
        for method in methods(asynchronous):
            both = [parameters(getattr(kind, method)) for kind in (asynchronous, blocking)]
            assert both[0] == both[1], method


@pytest.mark.parametrize(
    ("kind", "method", "name"), EVERY_PARAMETER, ids=lambda value: getattr(value, "__name__", value)
)
def test_nc12_what_the_wire_cannot_hold_is_refused_by_field_limit_and_value(kind, method, name):
    for bad in [*REFUSED[name], *REFUSED_IN.get((method, name), ())]:
        with pytest.raises(InvalidArgument) as caught:
            call(kind, method, **{name: bad})
        error = caught.value
        assert error.field.startswith(name), (bad, error)
        assert error.details["limit"]
        assert error.details["value"]
        assert str(error).startswith(error.field)
        assert len(str(error)) < 500
        str(error).encode()


@pytest.mark.parametrize("kind", [AsyncClient, Client])
def test_nc12_what_is_needed_alone_is_sent(kind):
    for method in methods(kind):
        with contextlib.nullcontext() if method in ("__init__", "close") else pytest.raises(Sent):
            call(kind, method)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters())
    | st.text(st.characters(categories=["Cs"]))
    | st.binary()
    | st.sampled_from([np.float32(1), np.int64(-1), np.bool_(True), ROWS, np.array(1), object(), Unreadable()]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
PARAMETERS = [(method, name) for kind, method, name in EVERY_PARAMETER if kind is AsyncClient and method != "__init__"]


def refusal(kind, method, **given):
    """Return the error of a call that is refused, None for one that is sent."""
    with contextlib.suppress(Sent):
        try:
            call(kind, method, **given)
        except InvalidArgument as error:
            return error
    return None


@settings(max_examples=400, deadline=None)
@given(where=st.sampled_from(PARAMETERS), value=ANYTHING)
def test_nc12_anything_at_all_is_sent_or_refused_by_field(where, value):
    method, name = where
    error = refusal(AsyncClient, method, **{name: value})
    assert error is None or error.field.startswith((name, "prompt"))  # prompt stands for whichever of three is missing


def test_numbers_of_numpy_are_numbers():
    options = {"layer": np.int64(1), "window": np.uint8(3), "scale": np.float16(0.5), "soft_cap": np.int32(2)}
    slopes = np.array([0.5, 0.25], ml_dtypes.bfloat16)
    request = make_attend_request("a", ROWS, **options, query_lens=np.array([1, 2]), alibi_slopes=slopes, sinks=(1, 2))
    assert list(request.sequence_ids) == ["a"]
    assert (request.layer, list(request.query_lengths)) == (1, [1, 2])
    assert (request.options.window, request.options.scale, request.options.soft_cap) == (3, 0.5, 2.0)
    assert (list(request.options.alibi_slopes), list(request.options.sinks)) == ([0.5, 0.25], [1.0, 2.0])


DEFAULTS = {"max_tokens": None, "temperature": None, "top_k": 0, "top_p": None, "seed": None, "stop": ()}
DEFAULTS |= {"stop_token_ids": (), "ignore_eos": False, "salt": None}


def generate(prompt=None, token_ids=None, messages=None, **options):
    return generate_request(prompt, token_ids, messages, **(DEFAULTS | options))


@given(st.integers(0, 2**64 - 1), st.integers(1, 2**31 - 1), st.floats(0, 1e300), st.floats(0, 1, exclude_min=True))
def test_whatever_the_wire_holds_arrives_as_it_was(seed, max_tokens, temperature, top_p):
    sampling = generate("a", seed=seed, max_tokens=max_tokens, temperature=temperature, top_p=top_p).sampling
    assert (sampling.seed, sampling.max_tokens) == (seed, max_tokens)
    assert math.isclose(sampling.temperature, temperature, abs_tol=0)
    assert sampling.top_p == top_p


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_token_ids_arrive_from_any_iterable(token_ids):
    for given_as in (token_ids, tuple(token_ids), iter(token_ids), np.array(token_ids, np.int64)):
        assert list(generate(token_ids=given_as).tokens.token_ids) == token_ids


def test_one_stop_text_alone_is_one_and_not_its_letters():
    assert list(generate("a", stop="end").sampling.stop) == ["end"]
    assert list(generate("a", stop=["end", "END"]).sampling.stop) == ["end", "END"]


def test_salt_may_be_any_kind_of_bytes():
    for salt in (b"ab", bytearray(b"ab"), memoryview(b"ab")):
        assert generate("a", salt=salt).salt == b"ab"


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:1",
        "host.example:65535",
        "[::1]:50051",
        "unix:/a.sock",
        "unix:///a.sock",
        "dns:///host",
        "ipv4:1.2.3.4:5",
    ],
)
def test_targets_that_grpc_knows_are_taken(target):
    with contextlib.suppress(Sent):
        call(AsyncClient, "__init__", target=target)


@pytest.mark.parametrize("target", ["ipv4:127.0.0.1:99999", "dns:///host:70000", "127.0.0.1:99999"])
def test_port_that_grpc_would_take_modulo_65536_is_refused(target):
    with pytest.raises(InvalidArgument, match="65535"):
        call(AsyncClient, "__init__", target=target)


COMMAND_LINES = {
    "seed": ["a", "--seed", "-1"],
    "max_tokens": ["a", "--max-tokens", str(2**70)],
    "temperature": ["a", "--temperature", "nan"],
    "prompt": [b"\xff"],
    "stop": ["a", "--stop", b"\xff"],
    "target": ["a", "--target", "127.0.0.1:99999"],
}


@pytest.mark.parametrize(("field", "arguments"), COMMAND_LINES.items(), ids=COMMAND_LINES)
def test_nc12_command_line_refuses_by_name_without_a_traceback(field, arguments):
    command = [Path(sys.executable).parent / "pagedkv", "generate", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error INVALID_ARGUMENT {field}")
    assert "Traceback" not in done.stderr
