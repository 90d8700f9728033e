"""Linear layers over rounded activations: the stated error bound, one result for a row in any batch."""

from __future__ import annotations

import numpy as np
import pytest

from compute_dense.weights import make_weight
from pagedkv.compute.backend import WeightData
from pagedkv.compute.cpu.dense import CpuDenseOps
from pagedkv.compute.cpu.dense_integer import has_integer_dots
from pagedkv.compute.cpu.features import choose_isa
from pagedkv.config import ACTIVATIONS
from pagedkv.errors import InvalidArgument

KINDS = ("Q4_0", "Q4_1", "Q8_0")
LARGEST = {"int16": 32767, "int8": 127}
needs_vnni = pytest.mark.skipif(not has_integer_dots(choose_isa()), reason="this machine has no AVX-512 VNNI")


@pytest.fixture(params=LARGEST)
def activations(request) -> str:
    return request.param


@pytest.fixture
def ops(make_ops, activations) -> CpuDenseOps:
    return make_ops(activations=activations)


def make_rows(num_rows: int, num_inputs: int, seed: int = 1) -> np.ndarray:
    """Rows whose blocks differ in size by up to a factor of a thousand."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((num_rows, num_inputs // 32, 32))
    return (values * 10 ** rng.uniform(-2, 1, (num_rows, num_inputs // 32, 1))).reshape(num_rows, -1).astype(np.float32)


def error_bound(x: np.ndarray, values: np.ndarray, largest: int) -> np.ndarray:
    """Half a step of each block's scale times the magnitudes of its weights, and float32 rounding."""
    blocks, weights = np.abs(x).reshape(len(x), -1, 32), np.abs(values).reshape(len(values), -1, 32)
    rounding = blocks.max(-1) @ weights.sum(-1).T / (2 * largest)
    return 1.001 * rounding + 1e-6 * np.abs(x).astype(np.float64) @ np.abs(values).T


@needs_vnni
@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (96, 512)])
@pytest.mark.parametrize("kind", KINDS)
def test_rounded_linear_stays_within_half_a_step_of_each_block(ops, activations, kind, shape):
    weight, values = make_weight(kind, *shape)
    loaded = ops.load_weight(weight)
    for num_rows in (1, 2, 3, 5, 6, 7, 8, 13, 64):
        x = make_rows(num_rows, shape[1])
        error = np.abs(ops.linear(x, loaded) - x.astype(np.float64) @ values.T)
        assert (error <= error_bound(x, values, LARGEST[activations])).all()


@needs_vnni
@pytest.mark.parametrize("kind", KINDS)
def test_rounded_linear_of_whole_numbers_is_exact(ops, activations, kind):
    """Whole numbers up to the scale's largest are not rounded, and small sums are exact in float32."""
    weight, values = make_weight(kind, 32, 64)
    x = np.random.default_rng(0).integers(-3, 4, (5, 64)).astype(np.float32)
    x[:, ::32] = LARGEST[activations]
    expected = x.astype(np.float64) @ values.T
    magnitude = np.abs(x).astype(np.float64) @ np.abs(values).T
    assert (np.abs(ops.linear(x, ops.load_weight(weight)) - expected) <= 1e-6 * magnitude).all()


@needs_vnni
@pytest.mark.parametrize("kind", KINDS)
def test_rounded_row_in_any_batch_equals_row_alone_bit_by_bit(ops, kind):
    loaded = ops.load_weight(make_weight(kind, 80, 768)[0])
    x = make_rows(40, 768)
    alone = np.concatenate([ops.linear(x[row : row + 1], loaded) for row in range(40)])
    for num_rows in range(2, 41):
        np.testing.assert_array_equal(ops.linear(x[:num_rows], loaded), alone[:num_rows])


@needs_vnni
def test_rounded_linear_many_mixes_integer_and_float_kinds_without_sharing_panels(ops):
    kinds = (("Q4_1", 64), ("Q6_K", 64), ("Q8_0", 32), ("Q4_1", 20))
    weights = [ops.load_weight(make_weight(kind, n, 256)[0]) for kind, n in kinds]
    for num_rows in (1, 12, 50):
        x = make_rows(num_rows, 256)
        for result, weight in zip(ops.linear_many(x, weights), weights, strict=True):
            np.testing.assert_array_equal(result, ops.linear(x, weight))


@needs_vnni
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_rounded_linear_of_a_value_that_is_not_finite_gives_nan_in_its_row_alone(ops, kind, bad):
    loaded = ops.load_weight(make_weight(kind, 32, 96)[0])
    x = make_rows(3, 96)
    expected = ops.linear(x, loaded).copy()
    x[1, 40] = bad
    result = ops.linear(x, loaded)
    assert np.isnan(result[1]).all()
    np.testing.assert_array_equal(result[[0, 2]], expected[[0, 2]])


@needs_vnni
@pytest.mark.parametrize("kind", KINDS)
def test_rounded_linear_of_zeros_is_zero(ops, kind):
    assert not ops.linear(np.zeros((2, 64), np.float32), ops.load_weight(make_weight(kind, 16, 64)[0])).any()


def load_norm(ops: CpuDenseOps, size: int):
    values = np.random.default_rng(7).standard_normal(size).astype(np.float32)
    return ops.load_weight(WeightData("F32", values.shape, values.view(np.uint8)))


@pytest.mark.parametrize("isa_name", [None, "avx2", "portable"])
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("kinds", [("Q4_1",), ("Q8_0", "Q4_0"), ("Q4_1", "F16"), ()])
def test_row_operations_with_readers_give_them_what_they_read_of_float32(make_ops, isa_name, activations, kinds):
    """Bit by bit, on every path: also where some of the readers, or none, take rounded rows."""
    ops = make_ops(isa_name, activations=activations)
    readers = [ops.load_weight(make_weight(kind, 48, 576)[0]) for kind in kinds]
    for num_rows in (1, 5, 70):
        x, y = make_rows(num_rows, 576), make_rows(num_rows, 576, seed=2)
        norm, total = load_norm(ops, 576), x + y
        pairs = [
            (ops.rms_norm(x, norm, 1e-5, readers), ops.rms_norm(x, norm, 1e-5)),
            (ops.silu_mul(x, y, readers), ops.silu_mul(x, y)),
            (ops.add_rms_norm(x, y, norm, 1e-5, readers), ops.rms_norm(total, norm, 1e-5)),
        ]
        np.testing.assert_array_equal(x, total)
        for result, plain in pairs:
            assert result.shape == plain.shape
            for got, expected in zip(ops.linear_many(result, readers), ops.linear_many(plain, readers), strict=True):
                np.testing.assert_array_equal(got, expected)


@needs_vnni
def test_rows_rounded_for_integer_weights_are_refused_by_others(ops):
    x = make_rows(3, 64)
    rounded = ops.silu_mul(x, x, [ops.load_weight(make_weight("Q4_1", 32, 64)[0])])
    with pytest.raises(ValueError, match="rounded"):
        ops.linear(rounded, ops.load_weight(make_weight("F16", 32, 64)[0]))


@pytest.mark.parametrize("kind", ["F32", "F16", "Q6_K"])
def test_rounded_activations_leave_other_kinds_as_they_are(make_ops, ops, kind):
    weight = make_weight(kind, 32, 256)[0]
    x = make_rows(9, 256)
    exact = make_ops()
    np.testing.assert_array_equal(ops.linear(x, ops.load_weight(weight)), exact.linear(x, exact.load_weight(weight)))


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_rounded_activations_without_the_instructions_compute_in_float32(make_ops, activations, isa):
    weight = make_weight("Q4_1", 32, 64)[0]
    x = make_rows(4, 64)
    exact, rounded = make_ops(isa), make_ops(isa, activations=activations)
    np.testing.assert_array_equal(
        rounded.linear(x, rounded.load_weight(weight)), exact.linear(x, exact.load_weight(weight))
    )


def test_unknown_activations_are_refused_with_those_that_exist(make_ops):
    with pytest.raises(InvalidArgument, match=r"activations.*float32.*int16.*int8.*int4"):
        make_ops(activations="int4")
