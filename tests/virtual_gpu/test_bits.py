"""Shifts, permutations, bit fields, packing."""

from __future__ import annotations

import numpy as np
import pytest

from virtual_gpu.harness import evaluate


def test_shift_amounts_clamp_at_the_width():
    amounts = ("u32", [0, 1, 31, 32, 200])
    top = ("u32", [0x80000000])
    assert evaluate("shl.b32 %d, %a, %b;", "u32", a=("u32", [3]), b=amounts).tolist() == [3, 6, 0x80000000, 0, 0]
    assert evaluate("shr.u32 %d, %a, %b;", "u32", a=top, b=amounts).tolist() == [1 << 31, 1 << 30, 1, 0, 0]
    assert evaluate("shr.s32 %d, %a, %b;", "s32", a=top, b=amounts).tolist() == [-(2**31), -(2**30), -1, -1, -1]
    assert evaluate("shl.b64 %d, %a, 64;", "u64", a=("u64", [3]))[0] == 0
    assert evaluate("shr.s16 %d, %a, 20;", "s16", a=("s16", [-5]))[0] == -1


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("shf.l.wrap.b32 %d, %a, %b, 8;", 0xBBCCDD11),
        ("shf.r.wrap.b32 %d, %a, %b, 8;", 0xDD112233),
        ("shf.l.wrap.b32 %d, %a, %b, 40;", 0xBBCCDD11),
        ("shf.l.clamp.b32 %d, %a, %b, 40;", 0x11223344),
        ("shf.r.clamp.b32 %d, %a, %b, 40;", 0xAABBCCDD),
    ],
)
def test_funnel_shift_takes_its_window_of_the_pair(code, expected):
    assert evaluate(code, "u32", a=("u32", [0x11223344]), b=("u32", [0xAABBCCDD]))[0] == expected


@pytest.mark.parametrize(
    ("selector", "expected"),
    [(0x3210, 0x44332211), (0x7654, 0x88776655), (0x0123, 0x11223344), (0x5410, 0x66552211), (0x888C, 0x00000000),
     (0xFFFF, 0xFFFFFFFF)],
)  # fmt: skip
def test_prmt_selects_bytes_and_replicates_signs(selector, expected):
    result = evaluate(f"prmt.b32 %d, %a, %b, {selector};", "u32", a=("u32", [0x44332211]), b=("u32", [0x88776655]))
    assert result[0] == expected


def test_bfe_extends_the_sign_and_reads_zero_beyond_the_top():
    a = ("s32", [0x0000F800])
    assert evaluate("bfe.u32 %d, %a, 11, 5;", "u32", a=a)[0] == 31
    assert evaluate("bfe.s32 %d, %a, 11, 5;", "s32", a=a)[0] == -1
    assert evaluate("bfe.u32 %d, %a, 28, 8;", "u32", a=("u32", [0xF0000000]))[0] == 15
    assert evaluate("bfe.s32 %d, %a, 28, 8;", "s32", a=("u32", [0xF0000000]))[0] == -1
    assert evaluate("bfe.u32 %d, %a, 0, 0;", "u32", a=a)[0] == 0


def test_bfi_replaces_a_field():
    assert evaluate("bfi.b32 %d, %a, %b, 8, 8;", "u32", a=("u32", [0xAB]), b=("u32", [0x11111111]))[0] == 0x1111AB11
    assert evaluate("bfi.b64 %d, %a, %b, 32, 32;", "u64", a=("u64", [7]), b=("u64", [9]))[0] == (7 << 32) | 9


def test_counting_instructions():
    a = ("u32", [0, 1, 0x80000000, 0x00F00000])
    assert evaluate("popc.b32 %d, %a;", "u32", a=a).tolist() == [0, 1, 1, 4]
    assert evaluate("clz.b32 %d, %a;", "u32", a=a).tolist() == [32, 31, 0, 8]
    assert evaluate("bfind.u32 %d, %a;", "u32", a=a).tolist() == [0xFFFFFFFF, 0, 31, 23]
    assert evaluate("bfind.s32 %d, %a;", "u32", a=("s32", [-1, -2, 4])).tolist() == [0xFFFFFFFF, 0, 2]
    assert evaluate("brev.b32 %d, %a;", "u32", a=("u32", [0x00000003]))[0] == 0xC0000000


@pytest.mark.parametrize("table", [0x80, 0xFE, 0x96, 0xCA, 0xE8, 0x01])
def test_lop3_follows_its_truth_table(table):
    a, b, c = 0xF0F0CCAA, 0x3C5A9911, 0x0FF0A5A5
    expected = 0
    for bit in range(32):
        index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)
        expected |= (table >> index & 1) << bit
    result = evaluate(f"lop3.b32 %d, %a, %b, %c, {table};", "u32", a=("u32", [a]), b=("u32", [b]), c=("u32", [c]))
    assert result[0] == expected


def test_dp4a_sums_signed_and_unsigned_byte_products():
    a, b = ("u32", [0xFF020304]), ("u32", [0x01010101])
    assert evaluate("dp4a.s32.s32 %d, %a, %b, 10;", "s32", a=a, b=b)[0] == -1 + 2 + 3 + 4 + 10
    assert evaluate("dp4a.u32.u32 %d, %a, %b, 10;", "u32", a=a, b=b)[0] == 255 + 2 + 3 + 4 + 10


def test_mov_packs_and_unpacks_little_endian():
    code = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %a; mov.b32 %d, {hi, lo}; }"
    assert evaluate(code, "u32", a=("u32", [0x11223344]))[0] == 0x33441122
    code = "{ .reg .b32 lo, hi; mov.b64 {lo, hi}, %a; mov.b64 %d, {hi, lo}; }"
    assert evaluate(code, "u64", a=("u64", [0x1111111122222222]))[0] == 0x2222222211111111


def test_logic_on_predicates_and_cnot():
    code = (
        "setp.gt.u32 %p, %a, 2; setp.lt.u32 %p2, %a, 5; and.pred %p, %p, %p2; not.pred %p, %p; selp.u32 %d, 1, 0, %p;"
    )
    assert evaluate(code, "u32", a=("u32", [1, 3, 4, 9])).tolist() == [1, 0, 0, 1]
    assert evaluate("cnot.b32 %d, %a;", "u32", a=("u32", [0, 5])).tolist() == [1, 0]


def test_narrow_types_use_the_low_part_of_a_wider_register():
    assert evaluate("cvt.s32.s8 %d, %a;", "s32", a=("u16", [0x12FF]))[0] == -1
    assert evaluate("cvt.u32.u8 %d, %a;", "u32", a=("u32", [0x1280]))[0] == 0x80
    assert evaluate("cvt.s8.s32 %d, %a;", "u32", a=("s32", [0x80]))[0] == np.uint32(0xFFFFFF80)
