"""NumPy arrays to tensor messages and back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pagedkv.dtypes import DType
from pagedkv.errors import InvalidArgument
from pagedkv.v1 import tensor_pb2

_DATA_TYPES = {
    np.dtype(np.float32): tensor_pb2.DATA_TYPE_FLOAT32,
    np.dtype(np.float16): tensor_pb2.DATA_TYPE_FLOAT16,
    np.dtype(ml_dtypes.bfloat16): tensor_pb2.DATA_TYPE_BFLOAT16,
}
DTYPES = {
    tensor_pb2.DATA_TYPE_FLOAT32: DType.FLOAT32,
    tensor_pb2.DATA_TYPE_FLOAT16: DType.FLOAT16,
    tensor_pb2.DATA_TYPE_BFLOAT16: DType.BFLOAT16,
    tensor_pb2.DATA_TYPE_INT8: DType.INT8,
    tensor_pb2.DATA_TYPE_FLOAT8_E4M3: DType.FLOAT8_E4M3,
}


def to_tensor(array: npt.NDArray[Any], field: str) -> tensor_pb2.Tensor:
    """Return a message with the array's bytes; float64 is rounded to float32."""
    array = np.asarray(array)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    data_type = _DATA_TYPES.get(array.dtype)
    if data_type is None:
        raise InvalidArgument("must be float32, float16 or bfloat16", field=f"{field}.data_type", value=array.dtype)
    return tensor_pb2.Tensor(data_type=data_type, shape=array.shape, data=np.ascontiguousarray(array).tobytes())


def to_array(tensor: tensor_pb2.Tensor) -> npt.NDArray[np.float32]:
    """Return a float32 message as a read-only array over its bytes."""
    return np.frombuffer(tensor.data, dtype="<f4").reshape(tuple(tensor.shape))
