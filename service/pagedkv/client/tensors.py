"""Arrays of any library to tensor messages, and messages to NumPy arrays."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pagedkv.client.arguments import refuse
from pagedkv.client.dlpack import is_on_device, read_dlpack
from pagedkv.dtypes import DType
from pagedkv.v1 import tensor_pb2

_DATA_TYPES: Final = {
    np.dtype(np.float32): tensor_pb2.DATA_TYPE_FLOAT32,
    np.dtype(np.float16): tensor_pb2.DATA_TYPE_FLOAT16,
    np.dtype(ml_dtypes.bfloat16): tensor_pb2.DATA_TYPE_BFLOAT16,
}
_ROUNDED: Final = np.dtype(np.float64)
_WIDENED: Final = frozenset(  # float16 holds each of their values
    np.dtype(kind)
    for kind in (
        ml_dtypes.float8_e4m3,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e4m3fnuz,
        ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e5m2fnuz,
    )
)
_MAX_BYTES: Final = (2**31 - 1) // 3  # queries, keys and values of one message, which protobuf limits to 2 GiB
_EXPECTED = "float32, float16, bfloat16, float64 (rounded to float32) or an 8-bit float"
DTYPES = {
    tensor_pb2.DATA_TYPE_FLOAT32: DType.FLOAT32,
    tensor_pb2.DATA_TYPE_FLOAT16: DType.FLOAT16,
    tensor_pb2.DATA_TYPE_BFLOAT16: DType.BFLOAT16,
    tensor_pb2.DATA_TYPE_INT8: DType.INT8,
    tensor_pb2.DATA_TYPE_FLOAT8_E4M3: DType.FLOAT8_E4M3,
}


def to_tensor(source: Any, field: str) -> tensor_pb2.Tensor:
    """Return a message with an array's elements, copied once; see `as_array` for what is taken.

    float64 is rounded to float32, 8-bit floats become float16. Raises InvalidArgument for any other type, and for a
    float64 that float32 cannot hold, and for more bytes than a message may hold.
    """
    array = as_array(source, field)
    wire_type = _wire_type(array.dtype, field)
    num_bytes = array.size * wire_type.itemsize
    if num_bytes > _MAX_BYTES:
        refuse(field, f"must hold at most {_MAX_BYTES} bytes", num_bytes, _MAX_BYTES)
    data = _convert(array, wire_type.newbyteorder("<"), field).tobytes()
    return tensor_pb2.Tensor(data_type=_DATA_TYPES[wire_type], shape=array.shape, data=data)


def as_array(source: Any, field: str) -> npt.NDArray[Any]:
    """Return a view of an array's elements as NumPy has them, a copy only of lists and of what lies on a device.

    Takes NumPy arrays, PyTorch tensors (their gradient stays behind), anything with `__dlpack__`, `__array__` or
    `__array_interface__`, and nested lists of numbers. A PyTorch tensor on a device is copied to the host; anything
    else there is refused.
    """
    if isinstance(source, np.ma.MaskedArray):
        refuse(field, "must not be masked; fill it first", type(source).__name__, "an array without a mask")
    if isinstance(source, np.ndarray):
        return source
    try:
        array = _read(source, field)
    except (BufferError, RuntimeError, TypeError, ValueError, OverflowError, AttributeError) as error:
        refuse(field, f"cannot be read as an array ({_one_line(error)})", _name(source), "an array in host memory")
    if array.dtype == object:
        refuse(field, "is no array of numbers", _name(source), _EXPECTED)
    return array


def to_array(tensor: tensor_pb2.Tensor) -> npt.NDArray[np.float32]:
    """Return a float32 message as an array of the caller's own."""
    return np.frombuffer(tensor.data, dtype="<f4").reshape(tuple(tensor.shape)).copy()


def _read(source: Any, field: str) -> npt.NDArray[Any]:
    for method in ("detach", "resolve_neg"):  # PyTorch exports no gradient, and forgets a sign that is still to come
        source = getattr(source, method)() if hasattr(source, method) else source
    if hasattr(source, "__dlpack__"):
        if is_on_device(source):
            source = _to_host(source, field)
        return read_dlpack(source)
    if hasattr(source, "__cuda_array_interface__"):
        _refuse_device(source, field)
    return np.asarray(source)


def _to_host(source: Any, field: str) -> Any:
    host = source.cpu() if hasattr(source, "cpu") else source
    if is_on_device(host):
        _refuse_device(source, field)
    return host


def _refuse_device(source: Any, field: str) -> None:
    refuse(field, "must be in host memory; copy it from its device first", _name(source), "host memory")


def _wire_type(dtype: np.dtype[Any], field: str) -> np.dtype[Any]:
    native = dtype.newbyteorder("=")
    if native == _ROUNDED:
        return np.dtype(np.float32)
    if native in _WIDENED:
        return np.dtype(np.float16)
    if native not in _DATA_TYPES:
        refuse(f"{field}.data_type", f"must be {_EXPECTED}", str(dtype), _EXPECTED)
    return native


def _convert(array: npt.NDArray[Any], dtype: np.dtype[Any], field: str) -> npt.NDArray[Any]:
    if array.dtype == dtype:
        return array
    try:
        with np.errstate(over="raise"):
            return array.astype(dtype)
    except FloatingPointError:
        peak = float(np.abs(array[np.isfinite(array)]).max())
        refuse(field, "must be within float32's range", peak, float(np.finfo(np.float32).max))


def _name(source: object) -> str:
    return type(source).__name__


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
