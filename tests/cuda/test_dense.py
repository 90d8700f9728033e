"""What a decoder needs, on the virtual GPU, against float64 NumPy and the CPU reference."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from compute_dense.weights import make_weight
from helpers.attention_cases import make_layout
from helpers.cuda import make_virtual_backend
from helpers.numpy_dense import NumpyBackend
from pagedkv.compute.backend import Rotation, WeightData
from pagedkv.dtypes import DType
from pagedkv.errors import InvalidArgument, UnsupportedModel


@pytest.fixture
def backend():
    made, driver = make_virtual_backend(make_layout(num_blocks=1), weight_dtype=DType.FLOAT32)
    yield made
    made.close()
    driver.assert_clean()


def run(backend, job, *arrays):
    """Run `job` on uploaded arrays and return its tensor on the host."""
    return backend.submit(lambda: backend.to_host(job(*(backend.from_host(array) for array in arrays)))).result()


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(3, 576), (2, 5, 64), (1, 33)])
def test_rms_norm_equals_its_formula(backend, shape):
    x, weight = draw(*shape), draw(shape[-1])
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(run(backend, lambda a, b: backend.rms_norm(a, b, 1e-5), x, weight), exact, atol=2e-6)


@pytest.mark.parametrize("shape", [(3, 576), (2, 5, 64), (1, 33), (2, 4096), (0, 64)])
def test_add_rms_norm_is_the_norm_of_the_sum_which_replaces_its_first_argument(backend, shape):
    x, y, weight = draw(*shape), 3 * draw(*shape)[::-1], draw(shape[-1])

    def job():
        tensors = [backend.from_host(array) for array in (x, y, weight)]
        normed = backend.add_rms_norm(*tensors, 1e-5)
        return [backend.to_host(tensor) for tensor in (normed, *tensors)]

    normed, total, *rest = backend.submit(job).result()
    exact = (x + y).astype(np.float64)
    np.testing.assert_array_equal(total, x + y)
    for after, before in zip(rest, (y, weight), strict=True):
        np.testing.assert_array_equal(after, before)
    scale = np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(normed, exact / scale * weight, atol=2e-6, rtol=1e-6)


def test_add_rms_norm_is_one_launch_of_16_byte_accesses_that_touches_each_sector_once():
    backend, driver = make_virtual_backend(make_layout(num_blocks=1))
    x, y, weight = draw(4, 1024), draw(4, 1024), draw(1024)

    def job():
        backend.add_rms_norm(*(backend.from_host(array) for array in (x, y, weight)), 1e-5)

    backend.submit(job).result()
    (stats,) = driver.launches
    assert stats.global_load_bytes.keys() == stats.global_store_bytes.keys() == {16}
    assert stats.write_ratio == 1.0
    assert stats.sectors_read <= (3 * x.nbytes + 4 * weight.nbytes) // 32  # x twice: the second time from L1
    backend.close()
    driver.assert_clean()


@pytest.mark.parametrize(("field", "shapes"), [("y", [(2, 8), (2, 4), (8,)]), ("weight", [(2, 8), (2, 8), (4,)])])
def test_add_rms_norm_refuses_shapes_that_do_not_fit_by_name(backend, field, shapes):
    with pytest.raises(InvalidArgument, match=field):
        run(backend, lambda *tensors: backend.add_rms_norm(*tensors, 1e-5), *(draw(*shape) for shape in shapes))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("num_pairs", [32, 16])
def test_rope_equals_float64_at_large_positions(backend, interleaved, num_pairs):
    x, positions = draw(4, 3, 64), np.array([0, 1, 777, 131_071], np.int32)
    inv_freq = (1e5 ** (-np.arange(num_pairs) / num_pairs)).astype(np.float32)
    exact = x.astype(np.float64)
    NumpyBackend(make_layout(num_blocks=1), np.float64).rope(exact, positions, Rotation(inv_freq, interleaved, 1.25))

    def job(a):
        backend.rope(a, positions, Rotation(inv_freq, interleaved, 1.25))
        return a

    np.testing.assert_allclose(run(backend, job, x), exact, atol=2e-6)


def test_silu_mul_equals_its_formula(backend):
    gate, up = draw(3, 100), draw(3, 100)
    np.testing.assert_allclose(run(backend, backend.silu_mul, gate, up), gate / (1 + np.exp(-gate)) * up, atol=2e-6)


def test_add_updates_its_first_argument(backend):
    x, y = draw(3, 50), draw(3, 50) * 2
    np.testing.assert_array_equal(run(backend, lambda a, b: (backend.add(a, b), a)[1], x, y), x + y)


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_embedding_and_take_rows_return_float32_rows(backend, kind):
    table, rows = draw(10, 70).astype(kind), np.array([3, 0, 9, 3], np.int32)
    np.testing.assert_array_equal(
        run(backend, lambda t: backend.embedding(t, rows), table), table[rows].astype(np.float32)
    )
    np.testing.assert_array_equal(
        run(backend, lambda t: backend.take_rows(t, rows), table), table[rows].astype(np.float32)
    )


def test_split_gives_contiguous_parts(backend):
    x = draw(3, 30)
    for index, exact in enumerate(np.split(x, [7, 12], axis=1)):
        np.testing.assert_array_equal(run(backend, lambda a, i=index: backend.split(a, [7, 5, 18])[i], x), exact)


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [("F32", np.float32, 2e-6), ("F16", np.float16, 2e-3), ("BF16", ml_dtypes.bfloat16, 1e-2)],
)
def test_linear_equals_the_product_with_the_stored_matrix(backend, kind, dtype, tolerance):
    x, weight, bias = draw(3, 64), draw(20, 64).astype(dtype), draw(20)
    data = WeightData(kind, weight.shape, np.frombuffer(weight.tobytes(), np.uint8))
    exact = x.astype(np.float64) @ weight.astype(np.float64).T + bias
    actual = run(backend, lambda a, b: backend.linear(a, backend.load_weight(data), b), x, bias)
    assert np.abs(actual - exact).max() <= tolerance * np.abs(exact).max()


def test_linear_many_gives_each_product_and_rounds_the_input_once_for_each_type(backend):
    x, biases = draw(3, 64), [None, draw(8), None, draw(20)]
    kinds = [("F16", np.float16, 20), ("F16", np.float16, 8), ("F32", np.float32, 5), ("BF16", ml_dtypes.bfloat16, 20)]
    weights = [draw(rows, 64).astype(dtype) for _, dtype, rows in kinds]
    data = [
        WeightData(kind, w.shape, np.frombuffer(w.tobytes(), np.uint8))
        for (kind, *_), w in zip(kinds, weights, strict=True)
    ]

    def job():
        tensors = [backend.load_weight(one) for one in data]
        sent = [None if bias is None else backend.from_host(bias) for bias in biases]
        return [backend.to_host(y) for y in backend.linear_many(backend.from_host(x), tensors, sent)]

    for y, weight, bias in zip(backend.submit(job).result(), weights, biases, strict=True):
        exact = x.astype(weight.dtype).astype(np.float64) @ weight.astype(np.float64).T + (0 if bias is None else bias)
        np.testing.assert_allclose(y, exact, atol=2e-5)
    launches = [stats.kernel for stats in backend.device.driver.module.launches]
    assert launches == ["cast", "cast", "add", "add"]


def test_linear_of_a_quantised_matrix_equals_the_product_with_its_dequantised_values(backend):
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    packed = quantize(draw(20, 64), GGMLQuantizationType.Q8_0)
    data, x = WeightData("Q8_0", (20, 64), packed), draw(3, 64)
    exact = x.astype(np.float64) @ dequantize(packed, GGMLQuantizationType.Q8_0).astype(np.float64).T
    np.testing.assert_allclose(
        run(backend, lambda a: backend.linear(a, backend.load_weight(data)), x), exact, atol=2e-5
    )


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q5_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS"])
@pytest.mark.parametrize(("dtype", "stored"), [(DType.FLOAT16, "F16"), (DType.FLOAT32, "F32")])
def test_nc19_quantised_matrix_becomes_the_weights_type_as_its_dequantiser_says(kind, dtype, stored):
    backend, driver = make_virtual_backend(make_layout(num_blocks=1), weight_dtype=dtype)
    weight, values = make_weight(kind, 7, 256)
    loaded = run(backend, lambda: backend.load_weight(weight))
    assert backend.stored_kind(kind) == stored
    np.testing.assert_array_equal(loaded, values.astype(np.float32).astype(loaded.dtype))
    backend.close()
    driver.assert_clean()


def test_an_unknown_weight_kind_is_refused_by_name(backend):
    weight = WeightData("Q9_Z", (1, 1), np.zeros(4, np.uint8))
    with pytest.raises(UnsupportedModel, match="Q9_Z"):
        backend.submit(lambda: backend.load_weight(weight)).result()


def test_sample_at_temperature_zero_takes_the_first_largest_logit(backend):
    logits = draw(3, 1000)
    logits[1, [7, 900]] = 50.0
    zeros, seeds = np.zeros(3, np.float32), np.arange(3, dtype=np.uint64)
    tokens = run(backend, lambda a: backend.sample(a, zeros, seeds), logits)
    np.testing.assert_array_equal(tokens, logits.argmax(1))


def test_sample_draws_from_the_softmax_and_repeats_for_a_seed(backend):
    probabilities = np.array([0.5, 0.3, 0.15, 0.05], np.float32)
    logits = np.tile(np.log(probabilities), (2000, 1))
    ones, seeds = np.ones(2000, np.float32), np.arange(2000, dtype=np.uint64)
    first = run(backend, lambda a: backend.sample(a, ones, seeds), logits)
    np.testing.assert_allclose(np.bincount(first, minlength=4) / 2000, probabilities, atol=0.04)
    np.testing.assert_array_equal(run(backend, lambda a: backend.sample(a, ones, seeds), logits), first)
