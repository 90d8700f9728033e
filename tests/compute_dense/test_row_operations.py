"""Norms, activations, rotations and rearrangements against float64 formulas."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.compute.backend import Rotation, WeightData


def make_values(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def load_vector(ops, values: np.ndarray):
    return ops.load_weight(WeightData("F32", values.shape, values.view(np.uint8)))


@pytest.mark.parametrize("shape", [(1, 576), (5, 64), (3, 9, 64), (130, 576), (4, 30), (0, 64)])
def test_rms_norm_equals_float64_formula(make_ops, isa, shape):
    ops = make_ops(isa)
    x, weight = make_values(*shape), make_values(shape[-1], seed=1)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(ops.rms_norm(x, load_vector(ops, weight), 1e-5), expected, rtol=1e-6, atol=1e-7)


def test_rms_norm_row_alone_equals_row_in_batch(make_ops, isa):
    ops = make_ops(isa)
    x, weight = make_values(50, 576), load_vector(ops, make_values(576, seed=1))
    batch = ops.rms_norm(x, weight, 1e-5)
    for row in range(50):
        np.testing.assert_array_equal(ops.rms_norm(x[row : row + 1], weight, 1e-5)[0], batch[row])


@pytest.mark.parametrize("shape", [(1, 1536), (9, 64), (40, 1536), (3, 21)])
def test_silu_mul_equals_float64_formula(make_ops, isa, shape):
    ops = make_ops(isa)
    gate, up = make_values(*shape, scale=5), make_values(*shape, seed=1)
    wide = gate.astype(np.float64)
    expected = wide / (1 + np.exp(-wide)) * up
    np.testing.assert_allclose(ops.silu_mul(gate, up), expected, rtol=2e-6, atol=1e-7)


def test_silu_mul_of_far_values_saturates_without_nan(make_ops, isa):
    gate = np.tile(np.array([-1e4, -100, 0, 100, 1e4], np.float32), 16).reshape(1, 80)
    with np.errstate(over="ignore"):
        result = make_ops(isa).silu_mul(gate, np.ones_like(gate))
    np.testing.assert_allclose(result, np.where(gate > 0, gate, 0), atol=1e-30)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_rope_equals_complex_rotation(make_ops, isa, interleaved, rotary_dim):
    num_pairs = rotary_dim // 2
    x = make_values(7, 3, 64)
    positions = np.array([0, 1, 5, 100, 4095, 7, 7], np.int32)
    inv_freq = (1e5 ** (-np.arange(num_pairs) / num_pairs)).astype(np.float32)
    expected = x.astype(np.float64)
    first, second = (
        (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2))
        if interleaved
        else (slice(0, num_pairs), slice(num_pairs, rotary_dim))
    )
    turn = 1.5 * np.exp(1j * positions[:, None] * inv_freq.astype(np.float64))[:, None]
    rotated = (expected[..., first] + 1j * expected[..., second]) * turn
    expected[..., first], expected[..., second] = rotated.real, rotated.imag
    make_ops(isa).rope(x, positions, Rotation(inv_freq, interleaved, 1.5))
    np.testing.assert_allclose(x, expected, atol=2e-6)


def test_rope_of_new_positions_in_the_same_array_uses_them(make_ops):
    ops, rotation = make_ops(), Rotation(np.array([1.0, 0.5], np.float32), interleaved=False)
    positions = np.array([3], np.int32)
    first, second = make_values(1, 1, 4), make_values(1, 1, 4)
    ops.rope(first, positions, rotation)
    positions[0] = 9
    ops.rope(second, positions, rotation)
    assert not np.allclose(first, second)


def test_add_updates_its_first_argument(make_ops):
    x, y = make_values(3, 8), make_values(3, 8, seed=1)
    expected = x + y
    assert make_ops().add(x, y) is x
    np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("width", [8, 6, 64])
def test_take_rows_returns_the_rows_in_order(make_ops, isa, width):
    x = make_values(6, width)
    np.testing.assert_array_equal(make_ops(isa).take_rows(x, np.array([5, 0, 5], np.int32)), x[[5, 0, 5]])


@pytest.mark.parametrize("row", [6, -7])
def test_take_rows_refuses_a_row_outside(make_ops, isa, row):
    for width in (6, 64):
        with pytest.raises(IndexError, match=str(row)):
            make_ops(isa).take_rows(make_values(6, width), np.array([0, row], np.int32))


def test_split_returns_contiguous_parts(make_ops):
    x = make_values(4, 10)
    parts = make_ops().split(x, [3, 5, 2])
    assert [part.shape[1] for part in parts] == [3, 5, 2]
    assert all(part.flags.c_contiguous for part in parts)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), x)


@pytest.mark.parametrize("shape", [(1, 576), (40, 64), (3, 30)])
def test_add_rms_norm_equals_the_norm_of_the_sum(make_ops, isa, shape):
    ops, rng = make_ops(isa), np.random.default_rng(0)
    x, y, weight = rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32), np.ones(shape[-1])
    norm = ops.load_weight(WeightData("F32", shape[-1:], weight.astype(np.float32).view(np.uint8)))
    total = x + y
    result = ops.add_rms_norm(x, y, norm, 1e-5)
    np.testing.assert_array_equal(x, total)
    np.testing.assert_array_equal(result, ops.rms_norm(total, norm, 1e-5))
