"""Linear layers over stored weights against float64 products of gguf's dequantised values."""

from __future__ import annotations

import numpy as np
import pytest

from compute_dense.weights import CONVERTED, KINDS, make_weight
from pagedkv.compute import dequantize
from pagedkv.compute.backend import WeightData
from pagedkv.errors import InvalidArgument, InvalidModelFile, UnsupportedModel

ROW_COUNTS = (1, 2, 3, 7, 8, 9, 16, 33, 130)


def make_rows(num_rows: int, num_inputs: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_rows, num_inputs)).astype(np.float32)


def assert_product(result: np.ndarray, x: np.ndarray, values: np.ndarray) -> None:
    """The error stays within float32 rounding of the sum of magnitudes."""
    expected = x.astype(np.float64) @ values.T
    magnitude = np.abs(x).astype(np.float64) @ np.abs(values).T
    assert result.dtype == np.float32
    assert result.shape == expected.shape
    assert (np.abs(result - expected) <= 1e-6 * magnitude).all()


@pytest.mark.parametrize("kind", KINDS)
def test_linear_every_kind_and_row_count_equals_float64_product(make_ops, isa, kind):
    ops = make_ops(isa)
    weight, values = make_weight(kind, 37, 512)
    loaded = ops.load_weight(weight)
    for num_rows in ROW_COUNTS:
        x = make_rows(num_rows, 512)
        assert_product(ops.linear(x, loaded), x, values)


@pytest.mark.parametrize("kind", KINDS)
def test_linear_row_in_any_batch_equals_row_alone_bit_by_bit_gn_21(make_ops, isa, kind):
    ops = make_ops(isa)
    loaded = ops.load_weight(make_weight(kind, 70, 768)[0])
    x = make_rows(40, 768)
    alone = np.concatenate([ops.linear(x[row : row + 1], loaded) for row in range(40)])
    for num_rows in range(2, 41):
        np.testing.assert_array_equal(ops.linear(x[:num_rows], loaded), alone[:num_rows])


@pytest.mark.parametrize("num_outputs", [1, 2, 3, 5, 63, 64, 65, 257])
@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
def test_linear_odd_output_count_equals_float64_product(make_ops, kind, num_outputs):
    ops = make_ops()
    weight, values = make_weight(kind, num_outputs, 96)
    for num_rows in (1, 5, 19):
        x = make_rows(num_rows, 96)
        assert_product(ops.linear(x, ops.load_weight(weight)), x, values)


@pytest.mark.parametrize("num_inputs", [1, 7, 16, 17, 100])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_linear_plain_kind_of_any_width_equals_float64_product(make_ops, kind, num_inputs):
    ops = make_ops()
    weight, values = make_weight(kind, 9, num_inputs)
    for num_rows in (1, 12):
        x = make_rows(num_rows, num_inputs)
        assert_product(ops.linear(x, ops.load_weight(weight)), x, values)


def test_linear_wide_rows_use_small_panels(make_ops):
    ops = make_ops()
    weight, values = make_weight("Q8_0", 24, 32_768)
    x = make_rows(11, 32_768)
    assert_product(ops.linear(x, ops.load_weight(weight)), x, values)


@pytest.mark.parametrize("kind", ["Q4_1", "F16"])
def test_linear_any_number_of_threads_gives_the_same_bits(make_ops, kind):
    weight, _ = make_weight(kind, 301, 256)
    for num_rows in (1, 4, 8, 50):
        x = make_rows(num_rows, 256)
        results = [make_ops(None, n).linear(x, make_ops(None, n).load_weight(weight)) for n in (1, 2, 3)]
        np.testing.assert_array_equal(results[0], results[1])
        np.testing.assert_array_equal(results[0], results[2])


def test_linear_bias_is_added_to_every_row(make_ops):
    ops = make_ops()
    loaded = ops.load_weight(make_weight("Q8_0", 30, 64)[0])
    bias = np.linspace(-1, 1, 30, dtype=np.float32)
    x = make_rows(5, 64)
    plain = ops.linear(x, loaded).copy()
    with_bias = ops.linear(x, loaded, ops.load_weight(WeightData("F32", (30,), bias.view(np.uint8))))
    np.testing.assert_array_equal(with_bias, plain + bias)


def test_linear_no_rows_gives_no_rows(make_ops):
    ops = make_ops()
    loaded = ops.load_weight(make_weight("F32", 6, 32)[0])
    assert ops.linear(np.empty((0, 32), np.float32), loaded).shape == (0, 6)


def test_linear_result_survives_later_operations(make_ops):
    ops = make_ops()
    loaded = ops.load_weight(make_weight("Q4_0", 48, 64)[0])
    x = make_rows(3, 64)
    kept = ops.linear(x, loaded)
    before = kept.copy()
    for seed in range(5):
        ops.linear(make_rows(3, 64, seed), loaded)
    np.testing.assert_array_equal(kept, before)


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_every_kind_equals_dequantised_rows(make_ops, isa, kind):
    ops = make_ops(isa)
    weight, values = make_weight(kind, 50, 256)
    ids = np.array([49, 0, 7, 7, 23], np.int32)
    rows = ops.embedding(ops.load_weight(weight), ids)
    np.testing.assert_allclose(rows, values[ids], rtol=3e-7, atol=3e-7 * np.abs(values).max())


def test_load_weight_keeps_the_stored_bytes(make_ops):
    weight, _ = make_weight("Q4_1", 33, 64)
    assert np.shares_memory(make_ops().load_weight(weight).data, weight.data)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_load_weight_vector_of_any_plain_kind_holds_its_values(make_ops, kind):
    weight, values = make_weight(kind, 1, 48)
    loaded = make_ops().load_weight(WeightData(kind, (48,), weight.data))
    np.testing.assert_array_equal(loaded.data, values[0])


def test_load_weight_unknown_kind_is_refused_by_name(make_ops):
    with pytest.raises(UnsupportedModel, match=r"Q8_K are not supported"):
        make_ops().load_weight(WeightData("Q8_K", (4, 256), np.zeros(4 * 292, np.uint8)))


@pytest.mark.parametrize("kind", CONVERTED)
def test_nc19_kind_without_a_kernel_is_converted_and_equals_float64_product(make_ops, isa, kind):
    ops = make_ops(isa)
    weight, values = make_weight(kind, 5, 512)
    loaded = ops.load_weight(weight)
    exact = {"Q5_0": "Q8_0", "IQ4_NL": "Q8_0", "Q3_K": "Q6_K"}
    assert loaded.kind.name == ops.stored_kind(kind) == exact.get(kind, "F32")
    x = make_rows(3, 512)
    assert_product(ops.linear(x, loaded), x, values)
    rows = ops.embedding(loaded, np.arange(5, dtype=np.int32))
    np.testing.assert_array_equal(rows, values.astype(np.float32))


def test_nc19_conversion_of_many_rows_goes_some_rows_at_a_time(make_ops, monkeypatch):
    monkeypatch.setattr(dequantize, "_CHUNK_WEIGHTS", 3 * 256)
    for kind in ("Q3_K", "IQ4_NL"):
        weight, values = make_weight(kind, 10, 256)
        rows = make_ops().embedding(make_ops().load_weight(weight), np.arange(10, dtype=np.int32))
        np.testing.assert_array_equal(rows, values.astype(np.float32))


@pytest.mark.parametrize("shape", [(4, 64), (3, 32), (4, 33)])
def test_load_weight_wrong_size_is_refused_with_the_sizes(make_ops, shape):
    for kind in ("Q4_1", "Q5_1"):
        with pytest.raises(InvalidModelFile, match=r"has 80 bytes, \d+ are needed|no multiple of"):
            make_ops().load_weight(WeightData(kind, shape, np.zeros(80, np.uint8)))


def test_linear_many_of_mixed_kinds_equals_each_alone_bit_by_bit(make_ops, isa):
    ops = make_ops(isa)
    weights = [ops.load_weight(make_weight(kind, n, 256)[0]) for kind, n in (("Q4_1", 37), ("Q8_0", 64), ("Q6_K", 4))]
    bias = ops.load_weight(WeightData("F32", (64,), np.arange(64, dtype=np.float32).view(np.uint8)))
    for num_rows in (0, 1, 5, 30):
        x = np.random.default_rng(num_rows).standard_normal((num_rows, 256), np.float32)
        together = ops.linear_many(x, weights, [None, bias, None])
        for result, weight, added in zip(together, weights, (None, bias, None), strict=True):
            np.testing.assert_array_equal(result, ops.linear(x, weight, added))


@pytest.mark.parametrize("activations", ["float32", "int16", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_rl01_a_row_that_is_not_finite_stays_so_and_changes_no_other(make_ops, kind, activations):
    try:
        ops = make_ops(activations=activations)
    except InvalidArgument as error:
        pytest.skip(error.message)
    loaded = ops.load_weight(make_weight(kind, 48, 512)[0])
    for num_rows in (2, 9, 40):
        x = make_rows(num_rows, 512)
        expected = ops.linear(x, loaded)
        for value in (np.nan, np.inf, -np.inf):
            spoilt = x.copy()
            spoilt[1, 77] = value
            result = ops.linear(spoilt, loaded)
            np.testing.assert_array_equal(np.delete(result, 1, 0), np.delete(expected, 1, 0))
            assert not np.isfinite(result[1]).any()
