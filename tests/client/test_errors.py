"""Errors on the client's side: what the server raised is what the caller catches."""

import asyncio
import inspect
from types import SimpleNamespace

import grpc
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.server import serving
from helpers.waiting import PATIENCE
from pagedkv import errors
from pagedkv.client import AsyncClient, Client
from pagedkv.client.failure import to_exception
from pagedkv.client.target import is_loopback_target
from pagedkv.client.tensors import to_tensor
from pagedkv.rpc import convert
from pagedkv.rpc.status import code_of, to_status

EXAMPLES = [
    errors.InvalidArgument("must be at least 1", field="layer", value=-1, limit=4),
    errors.SequenceNotFound("a"),
    errors.SequenceExists("\u00b2"),
    errors.SequenceTooLong("the tokens are too many", num_tokens=9, limit=8),
    errors.PositionMismatch("a gap", position=9, expected=-1),
    errors.SequenceSwapped("a"),
    errors.OutOfBlocks(needed=3, free=2, evictable=1, total=4),
    errors.OutOfHostBlocks(needed=3, free=2, total=4),
    errors.SwapUnavailable("there is no host pool"),
    errors.QuotaExceeded("too many", limit=3),
    errors.Starting("the server is still loading"),
    errors.Draining("the server is shutting down"),
    errors.Unauthenticated("who are you"),
    errors.PermissionDenied("not yours"),
    errors.DeviceError("the device failed"),
    errors.DeviceLost("the device fell out"),
    errors.NumericalError("not finite"),
    errors.UnsupportedModel("no such thing"),
    errors.InvalidModelFile("cut short"),
    errors.PagedKvError("something else"),
]


def received(error):
    """Stand for a failed call whose status came over the wire."""
    status = to_status(error)
    return SimpleNamespace(
        code=lambda: status.code, details=lambda: status.details, trailing_metadata=lambda: status.trailing_metadata
    )


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_error_survives_the_wire_with_its_figures(error):
    again = to_exception(received(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.details == error.details
    assert {name: getattr(again, name) for name in vars(error)} == vars(error)


def test_examples_cover_every_error_and_each_has_a_code():
    kinds = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.PagedKvError)}
    assert kinds - {type(error) for error in EXAMPLES} == {errors.TransportError}
    assert {code_of(error) for error in EXAMPLES} <= set(grpc.StatusCode) - {grpc.StatusCode.UNKNOWN}


@given(st.text(max_size=20_000) | st.text("\U0001f600\u20ac\x00\n", min_size=200, max_size=2_000))
def test_status_of_any_text_fits_the_trailers(text):
    error = errors.InvalidArgument(f"must not be {text}", field="sequence_id", value=text)
    status = to_status(error)
    message = sum(1 if 32 <= byte < 127 else 3 for byte in status.details.encode())
    assert message + sum(len(value) * 4 / 3 for _, value in status.trailing_metadata) < 8_000
    assert to_exception(received(error)).field == "sequence_id"


@given(
    st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]), st.lists(st.integers(0, 4), min_size=1, max_size=4)
)
def test_tensor_of_either_end_is_that_of_the_other(dtype, shape):
    array = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    there = convert.to_array(to_tensor(array, "keys"), "keys")
    assert there.dtype == array.dtype
    assert np.array_equal(there, array)


def test_rows_out_of_order_in_memory_arrive_in_order():
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for view in (array.transpose(2, 0, 1), array[::-1], np.asfortranarray(array)):
        assert np.array_equal(convert.to_array(to_tensor(view, "keys"), "keys"), view)


async def test_nobody_listening_is_a_transport_error():
    async with AsyncClient("127.0.0.1:1", timeout=PATIENCE) as client:
        for call in (client.allocate("a"), client.usage()):
            with pytest.raises(errors.TransportError) as caught:
                await asyncio.wait_for(call, 60)
            assert caught.value.code == "UNAVAILABLE"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_service_on_this_machine_is_reached_past_a_proxy_for_the_network(monkeypatch, host):
    """Containers often have http_proxy and no no_proxy; the one here refuses every connection."""
    for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with serving() as served, AsyncClient(f"{host}:{served.server.port}", timeout=PATIENCE) as client:
        assert (await client.usage()).total == 64


@pytest.mark.parametrize(
    ("target", "is_local"),
    [
        ("127.0.0.1:50051", True),
        ("127.8.8.8:1", True),
        ("localhost:50051", True),
        ("[::1]:50051", True),
        ("::1", True),
        ("ipv4:127.0.0.1:5", True),
        ("unix:/run/pagedkv.sock", True),
        ("10.0.0.1:50051", False),
        ("kv.example:50051", False),
        ("localhost.example:50051", False),
        ("dns:///kv.example:50051", False),
    ],
)
def test_only_targets_on_this_machine_go_past_a_proxy(target, is_local):
    assert is_loopback_target(target) == is_local


def test_blocking_client_closes_twice_and_leaves_no_thread():
    client = Client("127.0.0.1:1")
    client.close()
    client.close()
    assert not client._thread.is_alive()
