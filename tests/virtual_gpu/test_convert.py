"""cvt against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from virtual_gpu.harness import evaluate

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("rni", [2, 2, -2, 0]), ("rzi", [1, 2, -1, 0]), ("rmi", [1, 2, -2, 0]), ("rpi", [2, 3, -1, 1])],
)
def test_float_to_int_rounds_by_its_mode(mode, expected):
    values = [1.5, 2.5, -1.5, 0.25]
    assert evaluate(f"cvt.{mode}.s32.f32 %d, %a;", "s32", a=("f32", values)).tolist() == expected
    assert evaluate(f"cvt.{mode}.f32.f32 %d, %a;", "f32", a=("f32", values)).tolist() == expected


def test_float_to_int_clamps_and_nan_is_zero():
    values = ("f32", [1e20, -1e20, INF, -INF, NAN, -1.0])
    assert evaluate("cvt.rzi.s32.f32 %d, %a;", "s32", a=values).tolist() == [
        2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 0, -1,
    ]  # fmt: skip
    assert evaluate("cvt.rzi.u32.f32 %d, %a;", "u32", a=values).tolist() == [2**32 - 1, 0, 2**32 - 1, 0, 0, 0]
    assert evaluate("cvt.rzi.u8.f32 %d, %a;", "u32", a=("f32", [300.0, -4.0])).tolist() == [255, 0]
    assert evaluate("cvt.rzi.s64.f32 %d, %a;", "s64", a=values)[4] == -(2**63)


@pytest.mark.parametrize(
    ("mode", "expected"), [("rn", 16777216.0), ("rz", 16777216.0), ("rm", 16777216.0), ("rp", 16777218.0)]
)
def test_int_to_float_rounds_by_its_mode(mode, expected):
    assert evaluate(f"cvt.{mode}.f32.u32 %d, %a;", "f32", a=("u32", [16777217]))[0] == expected


def test_int_to_int_truncates_extends_and_saturates():
    assert evaluate("cvt.s64.s32 %d, %a;", "s64", a=("s32", [-5]))[0] == -5
    assert evaluate("cvt.u64.u32 %d, %a;", "u64", a=("u32", [0xFFFFFFFB]))[0] == 0xFFFFFFFB
    assert evaluate("cvt.u16.u32 %d, %a;", "u16", a=("u32", [0x12345]))[0] == 0x2345
    assert evaluate("cvt.sat.s8.s32 %d, %a;", "s32", a=("s32", [1000, -1000, 5])).tolist() == [127, -128, 5]
    assert evaluate("cvt.sat.u8.s32 %d, %a;", "u32", a=("s32", [1000, -1000, 5])).tolist() == [255, 0, 5]


@pytest.mark.parametrize(("mode", "expected"), [("rn", 0x3C01), ("rz", 0x3C00), ("rm", 0x3C00), ("rp", 0x3C01)])
def test_f32_to_f16_rounds_by_its_mode(mode, expected):
    value = 1 + 0.75 * 2.0**-10
    assert evaluate(f"cvt.{mode}.f16.f32 %d, %a;", "u16", a=("f32", [value]))[0] == expected


def test_f32_to_f16_ties_go_to_even_and_large_values_to_infinity():
    values = [1 + 2.0**-11, 1 + 3 * 2.0**-11, 65520.0, -65504.0, 2.0**-24, 2.0**-26]
    result = evaluate("cvt.rn.f16.f32 %d, %a;", "u16", a=("f32", values))
    assert result.tolist() == [0x3C00, 0x3C02, 0x7C00, 0xFBFF, 0x0001, 0x0000]
    assert evaluate("cvt.rz.f16.f32 %d, %a;", "u16", a=("f32", [65520.0]))[0] == 0x7BFF


def test_f32_to_bf16_rounds_to_even_and_keeps_nan():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800001, 0x7F7FFFFF], np.uint32)
    result = evaluate("cvt.rn.bf16.f32 %d, %a;", "u16", a=("f32", bits.view(np.float32)))
    assert result.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7FFF, 0x7F80]
    assert evaluate("cvt.rz.bf16.f32 %d, %a;", "u16", a=("f32", bits[2:3].view(np.float32)))[0] == 0x3F80


def test_packed_conversions_put_the_first_source_on_top():
    a, b = ("f32", [1.0]), ("f32", [2.0])
    assert evaluate("cvt.rn.f16x2.f32 %d, %a, %b;", "u32", a=a, b=b)[0] == 0x3C004000
    assert evaluate("cvt.rn.bf16x2.f32 %d, %a, %b;", "u32", a=a, b=b)[0] == 0x3F804000
    assert evaluate("cvt.rn.relu.f16x2.f32 %d, %a, %b;", "u32", a=("f32", [-1.0]), b=b)[0] == 0x00004000


def test_half_to_float_is_exact_for_all_patterns():
    bits = np.arange(0, 65536, 71, dtype=np.uint16)
    result = evaluate("cvt.f32.f16 %d, %a;", "f32", a=("u16", bits[:900]))
    np.testing.assert_array_equal(result, bits[:900].view(np.float16).astype(np.float32))


def test_fp8_saturates_rounds_to_even_and_keeps_nan():
    a = ("f32", [1000.0, -1000.0, 17.0, 19.0, NAN, 2.0**-9, 2.0**-10])
    result = evaluate("cvt.rn.satfinite.e4m3x2.f32 %d, %a, %b;", "u16", a=a, b=("f32", [1.0]))
    # 448, -448; 17 lies between 16 and 18 (tie to even mantissa 16), 19 between 18 and 20 (tie to 20)
    assert [hex(v >> 8) for v in result] == ["0x7e", "0xfe", "0x58", "0x5a", "0x7f", "0x1", "0x0"]
    assert (result & 0xFF == 0x38).all()
    back = evaluate("cvt.rn.f16x2.e4m3x2 %d, %a;", "u32", a=("u16", [0x7E38]))[0]
    assert back == (int(np.float16(448).view(np.uint16)) << 16) | 0x3C00


def test_f64_conversions():
    assert evaluate("cvt.rn.f32.f64 %d, %a;", "f32", a=("f64", [1 + 2.0**-24]))[0] == 1.0
    assert evaluate("cvt.rp.f32.f64 %d, %a;", "f32", a=("f64", [1 + 2.0**-24]))[0] == np.float32(1 + 2.0**-23)
    assert evaluate("cvt.f64.f32 %d, %a;", "f64", a=("f32", [0.1]))[0] == float(np.float32(0.1))


def test_tf32_rounds_half_away_from_zero():
    bits = np.array([0x3F801000, 0x3F800FFF, 0xBF801000], np.uint32)
    result = evaluate("cvt.rna.tf32.f32 %d, %a;", "u32", a=("f32", bits.view(np.float32)))
    assert result.tolist() == [0x3F802000, 0x3F800000, 0xBF802000]
