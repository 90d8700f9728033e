"""Arithmetic of single instructions against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from virtual_gpu.harness import evaluate

INF, NAN = float("inf"), float("nan")
ULP = 2.0**-23  # of 1.0 in float32
DENORMAL = 2.0**-130


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("rn", 1.0), ("rz", 1.0), ("rm", 1.0), ("rp", 1.0 + ULP)],
)
def test_add_f32_rounds_a_quarter_ulp_by_its_mode(mode, expected):
    assert evaluate(f"add.{mode}.f32 %d, %a, %b;", "f32", a=("f32", [1.0]), b=("f32", [ULP / 4]))[0] == expected


@pytest.mark.parametrize(("mode", "expected"), [("rn", -1.0), ("rz", -1.0), ("rm", -1.0 - ULP), ("rp", -1.0)])
def test_sub_f32_rounds_below_minus_one_by_its_mode(mode, expected):
    assert evaluate(f"sub.{mode}.f32 %d, %a, %b;", "f32", a=("f32", [-1.0]), b=("f32", [ULP / 4]))[0] == expected


@pytest.mark.parametrize(("mode", "expected"), [("rn", 2.0**127 * (2 - ULP)), ("rz", None), ("rp", INF)])
def test_mul_f32_at_the_top_of_the_range_overflows_by_its_mode(mode, expected):
    big = np.float32(2.0**127 * (2 - ULP))
    result = evaluate(f"mul.{mode}.f32 %d, %a, %b;", "f32", a=("f32", [big]), b=("f32", [2.0]))[0]
    assert result == (INF if mode in ("rn", "rp") else big)


@pytest.mark.parametrize(("mode", "expected"), [("rn", 1 / 3), ("rz", None), ("rm", None), ("rp", None)])
def test_div_f32_is_the_neighbour_of_a_third_by_its_mode(mode, expected):
    result = evaluate(f"div.{mode}.f32 %d, %a, %b;", "f32", a=("f32", [1.0]), b=("f32", [3.0]))[0]
    up, down = np.float32(0.33333334), np.nextafter(np.float32(0.33333334), np.float32(0))
    assert result == {"rn": up, "rz": down, "rm": down, "rp": up}[mode]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_sqrt_f32_of_two_is_the_neighbour_by_its_mode(mode):
    result = evaluate(f"sqrt.{mode}.f32 %d, %a;", "f32", a=("f32", [2.0]))[0]
    nearest = np.float32(1.4142135)  # 1.41421354, below the root
    assert result == (np.nextafter(nearest, np.float32(2)) if mode == "rp" else nearest)


def test_fma_f32_rounds_once():
    x = np.float32(1 + 2.0**-12)  # x * x - 1 = 2**-11 + 2**-24 exactly; rounding x * x first loses the last term
    result = evaluate("fma.rn.f32 %d, %a, %a, %b;", "f32", a=("f32", [x]), b=("f32", [-1.0]))[0]
    assert result == np.float32(2.0**-11 + 2.0**-24)


def test_fma_rz_and_rp_differ_by_one_ulp():
    low, high = (
        evaluate(f"fma.{m}.f32 %d, %a, %b, %c;", "f32", a=("f32", [1.0]), b=("f32", [1.0]), c=("f32", [ULP / 4]))[0]
        for m in ("rz", "rp")
    )
    assert (low, high) == (1.0, np.float32(1 + ULP))


def test_ftz_flushes_inputs_and_results_and_keeps_the_sign():
    result = evaluate("add.ftz.f32 %d, %a, %b;", "f32", a=("f32", [DENORMAL, -DENORMAL]), b=("f32", [0.0, -0.0]))
    assert result.tolist() == [0.0, 0.0]
    assert np.signbit(result).tolist() == [False, True]
    kept = evaluate("add.f32 %d, %a, %b;", "f32", a=("f32", [DENORMAL]), b=("f32", [0.0]))
    assert kept[0] == np.float32(DENORMAL)
    assert evaluate("mul.ftz.f32 %d, %a, %b;", "f32", a=("f32", [2.0**-100]), b=("f32", [2.0**-30]))[0] == 0


def test_sat_clamps_to_the_unit_interval_and_nan_to_zero():
    result = evaluate("add.sat.f32 %d, %a, %b;", "f32", a=("f32", [-2, 0.25, 7, NAN]), b=("f32", [0]))
    assert result.tolist() == [0.0, 0.25, 1.0, 0.0]


def test_min_and_max_return_the_number_where_one_side_is_nan():
    a, b = ("f32", [NAN, 1.0, -0.0, 0.0]), ("f32", [2.0, NAN, 0.0, -0.0])
    low = evaluate("min.f32 %d, %a, %b;", "f32", a=a, b=b)
    high = evaluate("max.f32 %d, %a, %b;", "f32", a=a, b=b)
    assert low.tolist() == [2.0, 1.0, 0.0, 0.0]
    assert np.signbit(low[2:]).tolist() == [True, True]
    assert np.signbit(high[2:]).tolist() == [False, False]
    assert np.isnan(evaluate("max.NaN.f32 %d, %a, %b;", "f32", a=a, b=b)[:2]).all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("eq", [0, 0, 1]), ("ne", [0, 1, 0]), ("lt", [0, 1, 0]), ("ge", [0, 0, 1]),
        ("equ", [1, 0, 1]), ("neu", [1, 1, 0]), ("ltu", [1, 1, 0]), ("geu", [1, 0, 1]),
        ("num", [0, 1, 1]), ("nan", [1, 0, 0]),
    ],
)  # fmt: skip
def test_setp_f32_orders_nan_as_its_name_says(name, expected):
    code = f"setp.{name}.f32 %p, %a, %b; selp.u32 %d, 1, 0, %p;"
    result = evaluate(code, "u32", a=("f32", [NAN, 1, 2]), b=("f32", [1, 2, 2]))
    assert result.tolist() == expected


def test_setp_signed_and_unsigned_disagree_on_the_top_bit():
    code = "setp.lt.{}32 %p, %a, %b; selp.u32 %d, 1, 0, %p;"
    a, b = ("u32", [0xFFFFFFFF]), ("u32", [1])
    assert evaluate(code.format("s"), "u32", a=a, b=b)[0] == 1
    assert evaluate(code.format("u"), "u32", a=a, b=b)[0] == 0


def test_setp_with_a_second_predicate_gives_the_complement_combined():
    code = "setp.gt.s32 %p2, %a, 10; setp.lt.and.s32 %p|%p2, %a, 5, %p2; selp.u32 %d, 1, 0, %p2;"
    assert evaluate(code, "u32", a=("s32", [3, 7, 20])).tolist() == [0, 0, 1]


def test_integer_add_wraps_and_saturates():
    a, b = ("s32", [2**31 - 1, -(2**31)]), ("s32", [1, -1])
    assert evaluate("add.s32 %d, %a, %b;", "s32", a=a, b=b).tolist() == [-(2**31), 2**31 - 1]
    assert evaluate("add.sat.s32 %d, %a, %b;", "s32", a=a, b=b).tolist() == [2**31 - 1, -(2**31)]


def test_mul_halves_and_wide_products():
    a, b = ("u32", [0xFFFFFFFF]), ("u32", [0xFFFFFFFF])
    assert evaluate("mul.lo.u32 %d, %a, %b;", "u32", a=a, b=b)[0] == 1
    assert evaluate("mul.hi.u32 %d, %a, %b;", "u32", a=a, b=b)[0] == 0xFFFFFFFE
    assert evaluate("mul.hi.s32 %d, %a, %b;", "s32", a=a, b=b)[0] == 0
    assert evaluate("mul.wide.u32 %d, %a, %b;", "u64", a=a, b=b)[0] == 0xFFFFFFFE00000001
    assert evaluate("mul.wide.s32 %d, %a, %b;", "s64", a=a, b=b)[0] == 1


def test_mul_hi_64_bit_is_the_upper_half_of_the_product():
    a, b = 0xFEDCBA9876543210, 0x123456789ABCDEF0
    signed_a = a - 2**64
    assert int(evaluate("mul.hi.u64 %d, %a, %b;", "u64", a=("u64", [np.uint64(a)]), b=("u64", [b]))[0]) == a * b >> 64
    assert (
        int(evaluate("mul.hi.s64 %d, %a, %b;", "s64", a=("s64", [signed_a]), b=("s64", [b]))[0]) == signed_a * b >> 64
    )


def test_mad_wide_adds_to_the_64_bit_product():
    result = evaluate("mad.wide.s32 %d, %a, %b, %c;", "s64", a=("s32", [-3]), b=("s32", [1 << 30]), c=("s64", [5]))
    assert result[0] == -3 * (1 << 30) + 5


def test_signed_division_truncates_and_the_rest_has_the_sign_of_the_dividend():
    a, b = ("s32", [7, -7, 7, -7]), ("s32", [2, 2, -2, -2])
    assert evaluate("div.s32 %d, %a, %b;", "s32", a=a, b=b).tolist() == [3, -3, -3, 3]
    assert evaluate("rem.s32 %d, %a, %b;", "s32", a=a, b=b).tolist() == [1, -1, 1, -1]


@pytest.mark.parametrize(
    ("name", "function"),
    [("rcp", lambda x: 1 / x), ("sqrt", np.sqrt), ("rsqrt", lambda x: 1 / np.sqrt(x)), ("ex2", np.exp2),
     ("lg2", np.log2), ("sin", np.sin), ("cos", np.cos), ("tanh", np.tanh)],
)  # fmt: skip
def test_approximate_functions_are_within_two_ulp_of_the_exact_value(name, function):
    x = np.array([0.1, 0.5, 1.0, 1.75, 3.0], np.float32)
    result = evaluate(f"{name}.approx.f32 %d, %a;", "f32", a=("f32", x))
    np.testing.assert_allclose(result, function(x.astype(np.float64)), rtol=2.4e-7, atol=1e-9)


def test_half_arithmetic_rounds_to_half_precision():
    one, tiny = 0x3C00, 0x1000  # 1.0 and 2**-11: half an ulp of 1, a tie that goes to even
    assert evaluate("add.rn.f16 %d, %a, %b;", "u16", a=("u16", [one]), b=("u16", [tiny]))[0] == 0x3C00
    assert evaluate("fma.rn.f16 %d, %a, %b, %a;", "u16", a=("u16", [one]), b=("u16", [one]))[0] == 0x4000
    pair = evaluate("add.rn.f16x2 %d, %a, %b;", "u32", a=("u32", [0x3C003C00]), b=("u32", [0x40003C00]))
    assert pair[0] == 0x42004000  # 1 + 2 and 1 + 1
    assert evaluate("neg.f16x2 %d, %a;", "u32", a=("u32", [0x3C00BC00]))[0] == 0xBC003C00


def test_bfloat16_arithmetic_rounds_to_bfloat16():
    assert (
        evaluate("fma.rn.bf16 %d, %a, %b, %c;", "u16", a=("u16", [0x3F80]), b=("u16", [0x3F80]), c=("u16", [0x3B80]))[0]
        == 0x3F80
    )  # 1 + 2**-8 is a tie: to even
    pair = evaluate("mul.rn.bf16x2 %d, %a, %b;", "u32", a=("u32", [0x3F804000]), b=("u32", [0x40404000]))
    assert pair[0] == 0x40404080  # 1 * 3 and 2 * 2


def test_copysign_and_testp_and_slct():
    assert evaluate("copysign.f32 %d, %a, %b;", "f32", a=("f32", [-1.0]), b=("f32", [3.0]))[0] == -3.0
    code = "testp.subnormal.f32 %p, %a; selp.u32 %d, 1, 0, %p;"
    assert evaluate(code, "u32", a=("f32", [DENORMAL, 1.0, 0.0])).tolist() == [1, 0, 0]
    assert evaluate("slct.u32.s32 %d, 1, 2, %a;", "u32", a=("s32", [-1, 0])).tolist() == [2, 1]
