"""Arrays of any library go in with one copy, that into the message; those that come back are the caller's own."""

import ctypes
import tracemalloc
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.client.arguments import float32, integer, integers
from pagedkv.client.tensors import as_array, to_array, to_tensor
from pagedkv.compute.dlpack import TENSOR_OFFSETS
from pagedkv.errors import InvalidArgument
from pagedkv.rpc import convert

FLOAT8 = [
    ml_dtypes.float8_e4m3,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e5m2fnuz,
]
CODES = {ml_dtypes.bfloat16: 4} | dict(zip(FLOAT8, (8, 10, 11, 12, 13), strict=True))  # DLDataTypeCode of dlpack.h
SENT_AS_THEY_ARE = [np.float32, np.float16, ml_dtypes.bfloat16]

get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class Exported:
    """What another library's tensor is to us: `__dlpack__` alone, of any type that DLPack knows, on any device."""

    def __init__(self, array, device=(1, 0), is_versioned=True):
        self.array, self._device, self._is_versioned = array, device, is_versioned

    def __dlpack_device__(self):
        return self._device

    def __dlpack__(self, **options):
        if not self._is_versioned and options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        code = CODES.get(self.array.dtype.type)
        raw = self.array if code is None else self.array.view(f"u{self.array.dtype.itemsize}")
        capsule = raw.__dlpack__(max_version=(1, 0)) if self._is_versioned else raw.__dlpack__()
        name = b"dltensor_versioned" if self._is_versioned else b"dltensor"
        if code is not None:
            where = get_pointer(capsule, name) + TENSOR_OFFSETS[name] + 20
            ctypes.c_uint8.from_address(where).value = code
        return capsule


class Tracked(Exported):
    """One that exports nothing while it requires a gradient, as PyTorch's tensors do."""

    def __dlpack__(self, **options):
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")

    def detach(self):
        return Exported(self.array)


class OnDevice(Exported):
    """One on a GPU, with PyTorch's way to the host."""

    def __init__(self, array):
        super().__init__(array, device=(2, 0))

    def cpu(self):
        return Exported(self.array)


class Interface:
    """An object with an array interface and nothing else."""

    def __init__(self, array):
        self.array = array
        self.__array_interface__ = array.__array_interface__


class CudaInterface:
    @property
    def __cuda_array_interface__(self):
        return {"shape": (1,), "typestr": "<f4", "data": (4096, False), "version": 3}


def make_array(dtype, shape=(3, 2, 4)):
    return np.random.default_rng(1).standard_normal(shape).astype(dtype)


def received(source):
    return convert.to_array(to_tensor(source, "keys"), "keys")


def assert_same(array, expected):
    assert array.dtype == expected.dtype
    assert array.tobytes() == expected.tobytes()
    assert array.shape == expected.shape


@pytest.mark.parametrize("is_versioned", [True, False])
@pytest.mark.parametrize("dtype", [*SENT_AS_THEY_ARE, np.float64, *FLOAT8])
def test_dlpack_is_read_in_place_whatever_the_type(dtype, is_versioned):
    array = make_array(dtype)
    view = as_array(Exported(array, is_versioned=is_versioned), "keys")
    assert_same(view, array)
    assert view.ctypes.data == array.ctypes.data


@pytest.mark.parametrize("dtype", SENT_AS_THEY_ARE)
@pytest.mark.parametrize("wrap", [np.asarray, Exported, Tracked, OnDevice, Interface])
def test_floats_of_the_wire_arrive_bit_by_bit_from_any_library(dtype, wrap):
    if wrap is Interface and dtype is ml_dtypes.bfloat16:
        pytest.skip("an array interface has no name for bfloat16")
    array = make_array(dtype)
    for strided in (array, array.transpose(2, 0, 1), array[:, ::-1], array[::2, :, 1:3]):
        assert_same(received(wrap(strided)), np.ascontiguousarray(strided))


def test_dlpack_without_a_device_is_read_in_host_memory_only():
    class Bare:
        def __init__(self, array):
            self.__dlpack__ = Exported(array).__dlpack__

    array = make_array(ml_dtypes.bfloat16)
    assert_same(received(Bare(array)), array)


def test_source_lives_as_long_as_its_view():
    view = as_array(Exported(make_array(ml_dtypes.bfloat16)), "keys")
    assert_same(view, make_array(ml_dtypes.bfloat16))


def test_pinned_host_memory_is_read_in_place():
    array = make_array(np.float16)
    assert as_array(Exported(array, device=(3, 0)), "keys").ctypes.data == array.ctypes.data


@pytest.mark.parametrize("dtype", FLOAT8)
def test_8_bit_floats_are_sent_as_float16_which_holds_each_of_their_values(dtype):
    every = np.arange(256, dtype=np.uint8).view(dtype)
    arrived = received(every.reshape(2, 128)).reshape(-1)
    assert arrived.dtype == np.float16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the comparison meets NaN
        np.testing.assert_array_equal(arrived.astype(np.float32), every.astype(np.float32))


@given(st.lists(st.floats(-3.4e38, 3.4e38), min_size=1))
def test_float64_is_rounded_to_the_nearest_float32(numbers):
    expected = np.array(numbers).astype(np.float32)
    assert_same(received(np.array(numbers)), expected)
    assert_same(received(numbers), expected)


def test_float64_beyond_float32_is_refused_and_infinity_and_nan_stay_what_they_are():
    with pytest.raises(InvalidArgument, match=r"^keys: must be within float32's range, got 1e\+39"):
        to_tensor(np.array([1.0, -1e39, np.inf]), "keys")
    assert_same(received(np.array([np.inf, -np.inf])), np.array([np.inf, -np.inf], np.float32))
    assert np.isnan(received(np.array([np.nan]))).all()


def test_other_byte_order_and_memory_that_is_read_only_are_taken():
    array = make_array(np.float32)
    assert_same(received(array.astype(">f4")), array)
    frozen = array.copy()
    frozen.flags.writeable = False
    assert_same(received(frozen), array)
    assert_same(received(Interface(frozen)), array)


@pytest.mark.parametrize("strided", [lambda a: a, lambda a: a.T, lambda a: a[::-1]])
@pytest.mark.parametrize("wrap", [np.asarray, Exported])
def test_only_copy_is_the_one_into_the_message(wrap, strided):
    source = wrap(strided(np.zeros((1024, 2048), np.float32)))
    tracemalloc.start()
    try:
        to_tensor(source, "keys")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.1 * 1024 * 2048 * 4


@pytest.mark.parametrize(
    "source", [Exported(make_array(np.float32), device=(2, 0)), CudaInterface()], ids=["dlpack", "cuda interface"]
)
def test_array_on_a_device_without_a_way_to_the_host_is_refused(source):
    with pytest.raises(InvalidArgument, match="must be in host memory; copy it from its device first"):
        to_tensor(source, "keys")


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, bool, np.complex64, "U3", object, "M8[s]"])
def test_other_types_are_refused_with_the_types_that_are_taken(dtype):
    with pytest.raises(InvalidArgument, match=r"float32, float16, bfloat16, float64 \(rounded to float32\)|no array"):
        to_tensor(np.zeros(3, dtype), "keys")


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.float8_e5m2])
def test_array_that_no_message_can_hold_is_refused_before_it_is_copied(dtype):
    vast = np.broadcast_to(np.zeros((), dtype), (2**30, 2**28))
    with pytest.raises(InvalidArgument, match=r"keys: must hold at most 715827882 bytes, got \d+"):
        to_tensor(vast, "keys")


def test_broken_exporter_is_refused_with_what_it_said():
    class Broken(Exported):
        def __dlpack__(self, **options):
            raise BufferError("this memory\nis lent")

    with pytest.raises(
        InvalidArgument, match=r"keys: cannot be read as an array \(this memory is lent\), got 'Broken'"
    ):
        to_tensor(Broken(make_array(np.float32)), "keys")


def test_array_that_comes_back_is_the_callers_own():
    message = to_tensor(make_array(np.float32), "output")
    array = to_array(message)
    array += 1
    assert_same(to_array(message), make_array(np.float32))


class TestTorch:
    """The same with PyTorch's own tensors, where it is installed."""

    @pytest.fixture(autouse=True)
    def torch(self):
        return pytest.importorskip("torch")

    @pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float64"])
    def test_tensors_of_every_float_type_arrive(self, torch, name):
        tensor = torch.randn(3, 2, 4).to(getattr(torch, name))
        for strided in (tensor, tensor.permute(2, 0, 1), tensor[:, 1:]):
            arrived = received(strided)
            assert np.array_equal(arrived.astype(np.float32), strided.to(torch.float32).numpy())
        assert as_array(tensor, "keys").ctypes.data == tensor.data_ptr()

    def test_gradient_stays_behind(self, torch):
        parameter = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
        assert_same(received(parameter), np.ones((2, 2), ml_dtypes.bfloat16))
        assert parameter.requires_grad

    def test_sign_that_is_still_to_come_is_not_lost(self, torch):
        negated = torch.complex(torch.zeros(3), torch.ones(3)).conj().imag
        assert negated.is_neg()
        assert_same(received(negated), -np.ones(3, np.float32))

    def test_scalars_are_numbers(self, torch):
        assert integer("layer", torch.tensor(5), 0, 9) == 5
        assert integers("token_ids", torch.tensor([1, 2]), 0, 9) == [1, 2]
        assert float32("scale", torch.tensor(0.5, dtype=torch.bfloat16)) == 0.5
        with pytest.raises(InvalidArgument):
            integer("layer", torch.tensor(True), 0, 9)

    def test_what_comes_back_becomes_a_tensor_without_a_warning(self, torch):
        tensor = torch.from_numpy(to_array(to_tensor(make_array(np.float32), "output")))
        tensor += 1

    @pytest.mark.parametrize("make", ["meta", "sparse", "ints"])
    def test_tensors_that_hold_no_rows_are_refused(self, torch, make):
        tensor = {
            "meta": lambda: torch.ones(2, device="meta"),
            "sparse": lambda: torch.ones(2, 2).to_sparse(),
            "ints": lambda: torch.ones(2, dtype=torch.int64),
        }[make]()
        with pytest.raises(InvalidArgument):
            to_tensor(tensor, "keys")
