"""Bits: logic, shifts, permutations, counting, moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from virtual_gpu.alu import (
    DTYPES,
    Alu,
    Array,
    allow,
    alu,
    bits_of,
    only_type,
    type_mods,
    uniform_alu,
    unsupported,
)
from virtual_gpu.ptx import Imm, Instruction, Operand, Vec

_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@alu("and", "or", "xor")
def _logic(instruction: Instruction) -> Alu:
    allow(instruction)
    return uniform_alu(instruction, _LOGIC[instruction.base], only_type(instruction))


@alu("not")
def _not(instruction: Instruction) -> Alu:
    return uniform_alu(instruction, np.invert, only_type(instruction))


@alu("cnot")
def _cnot(instruction: Instruction) -> Alu:
    return uniform_alu(instruction, lambda a: a == 0, only_type(instruction))


@alu("shl", "shr")
def _shift(instruction: Instruction) -> Alu:
    """Amounts of the width or more clamp: to zero, or to the sign for signed right shifts."""
    kind = only_type(instruction)
    result, a, amount = instruction.operands
    dtype, width = DTYPES[kind], bits_of(kind)
    operation: Callable[..., Any] = np.left_shift if instruction.base == "shl" else np.right_shift
    if kind[0] == "s" and instruction.base == "shr":
        limit = np.uint32(width - 1)
        function: Callable[..., Array] = lambda x, n: operation(x, np.minimum(n, limit).astype(dtype))  # noqa: E731
    elif isinstance(amount, Imm):
        n = amount.value & 0xFFFFFFFF
        constant = dtype(n if n < width else 0)
        function = (lambda x, _: operation(x, constant)) if n < width else lambda x, _: np.zeros_like(x)
    else:
        function = lambda x, n: np.where(n < width, operation(x, (n & (width - 1)).astype(dtype)), dtype(0))  # noqa: E731
    return Alu(function, ((a, kind), (amount, "u32")), ((result, kind),))


@alu("shf")
def _funnel(instruction: Instruction) -> Alu:
    result, low, high, amount = instruction.operands
    allow(instruction, "l", "r", "wrap", "clamp")
    is_left, is_wrap = "l" in instruction.mods, "wrap" in instruction.mods

    def function(lo: Array, hi: Array, n: Array) -> Array:
        n = (n & np.uint32(31) if is_wrap else np.minimum(n, np.uint32(32))).astype(np.uint64)
        pair = (hi.astype(np.uint64) << np.uint64(32)) | lo
        return (pair << n) >> np.uint64(32) if is_left else (pair >> n) & np.uint64(0xFFFFFFFF)

    return Alu(function, ((low, "b32"), (high, "b32"), (amount, "u32")), ((result, "b32"),))


_PRMT_MODES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "f4e": lambda n: (n, n + 1, n + 2, n + 3),
    "b4e": lambda n: (n, (n - 1) & 7, (n - 2) & 7, (n - 3) & 7),
    "rc8": lambda n: (n, n, n, n),
    "ecl": lambda n: (0, max(1, n), max(2, n), 3),
    "ecr": lambda n: (0, min(1, n), min(2, n), n),
    "rc16": lambda n: ((0, 1) if n % 2 == 0 else (2, 3)) * 2,
}


@alu("prmt")
def _prmt(instruction: Instruction) -> Alu:
    mode = next((m for m in instruction.mods if m in _PRMT_MODES), None)

    def function(a: Array, b: Array, selector: Array) -> Array:
        pool = (b.astype(np.uint64) << np.uint64(32)) | a
        result = np.uint64(0)
        for i in range(4):
            nibble = (selector >> np.uint32(4 * i)).astype(np.uint64) & np.uint64(15)
            if mode:
                table = np.array([_PRMT_MODES[mode](n)[i] for n in range(4)], np.uint64)
                nibble = table[(selector & np.uint32(3)).astype(np.intp)]
            byte = (pool >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(0xFF)
            sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
            byte = np.where(nibble & np.uint64(8), sign, byte)
            result = result | (byte << np.uint64(8 * i))
        return result

    return uniform_alu(instruction, function, "b32")


@alu("lop3")
def _lop3(instruction: Instruction) -> Alu:
    if "BOOL" in instruction.opcode or len(instruction.operands) != 5:
        raise unsupported(instruction, "lop3 with a predicate")
    result, a, b, c, table = instruction.operands
    assert isinstance(table, Imm)
    bits = table.value

    def function(x: Array, y: Array, z: Array) -> Array:
        value = np.zeros(np.broadcast_shapes(x.shape, y.shape, z.shape), np.uint32)
        for minterm in range(8):
            if bits >> minterm & 1:
                value |= (x if minterm & 4 else ~x) & (y if minterm & 2 else ~y) & (z if minterm & 1 else ~z)
        return value

    return Alu(function, ((a, "b32"), (b, "b32"), (c, "b32")), ((result, "b32"),))


@alu("bfe")
def _extract(instruction: Instruction) -> Alu:
    kind = only_type(instruction)
    result, a, start, length = instruction.operands
    width = bits_of(kind)

    def function(value: Array, position: Array, count: Array) -> Array:
        position = (position & np.uint32(255)).astype(np.int64)
        count = (count & np.uint32(255)).astype(np.int64)
        present = np.clip(width - position, 0, count)  # bits that exist; beyond them zero, or the sign
        unsigned = value.view(DTYPES["b" + kind[1:]])
        field = np.where(position < width, unsigned >> np.minimum(position, width - 1).astype(unsigned.dtype), 0)
        one = unsigned.dtype.type(1)
        full = ~unsigned.dtype.type(0)
        mask = np.where(present >= width, full, (one << np.minimum(present, width - 1).astype(unsigned.dtype)) - one)
        field = field.astype(unsigned.dtype) & mask
        if kind[0] == "u":
            return field
        top = np.minimum(position + count - 1, width - 1)
        sign = ((unsigned >> np.maximum(top, 0).astype(unsigned.dtype)) & one).astype(bool) & (count > 0)
        kept = np.minimum(count, np.maximum(width - position, 0))
        low = np.where(kept >= width, full, (one << np.clip(kept, 0, width - 1).astype(unsigned.dtype)) - one)
        return np.where(sign, field | ~low, field).view(value.dtype)

    return Alu(function, ((a, kind), (start, "u32"), (length, "u32")), ((result, kind),))


@alu("bfi")
def _insert(instruction: Instruction) -> Alu:
    kind = only_type(instruction)
    result, source, target, start, length = instruction.operands
    dtype, width = DTYPES[kind], bits_of(kind)

    def function(value: Array, into: Array, position: Array, count: Array) -> Array:
        position, count = position & np.uint32(255), count & np.uint32(255)
        one = dtype(1)
        shift = np.minimum(position, width - 1).astype(dtype)
        mask = np.where(count >= width, ~dtype(0), (one << np.minimum(count, width - 1).astype(dtype)) - one)
        mask = np.where(position < width, mask << shift, dtype(0)).astype(dtype)
        return (into & ~mask) | ((value << shift) & mask)

    return Alu(function, ((source, kind), (target, kind), (start, "u32"), (length, "u32")), ((result, kind),))


def count_ones(a: Array) -> Array:
    return np.bitwise_count(a)


def leading_zeros(a: Array) -> Array:
    """Zeros above the highest one; the width for 0."""
    width = 8 * a.dtype.itemsize
    filled = a
    step = 1
    while step < width:
        filled = filled | (filled >> a.dtype.type(step))
        step *= 2
    return width - np.bitwise_count(filled).astype(np.uint32)


@alu("popc", "clz")
def _count(instruction: Instruction) -> Alu:
    function = count_ones if instruction.base == "popc" else leading_zeros
    return uniform_alu(instruction, function, only_type(instruction), "u32")


@alu("bfind")
def _find(instruction: Instruction) -> Alu:
    kind = only_type(instruction)
    width = bits_of(kind)

    def function(a: Array) -> Array:
        bits = np.where(a < 0, ~a, a).view(DTYPES["b" + kind[1:]]) if kind[0] == "s" else a
        zeros = leading_zeros(bits).astype(np.int64)
        position = zeros if "shiftamt" in instruction.mods else width - 1 - zeros
        return np.where(zeros == width, 0xFFFFFFFF, position)

    return uniform_alu(instruction, function, kind, "u32")


@alu("brev")
def _reverse(instruction: Instruction) -> Alu:
    kind = only_type(instruction)
    dtype, width = DTYPES[kind], bits_of(kind)

    def function(a: Array) -> Array:
        step = width // 2
        mask = (1 << width) - 1
        while step:
            low = mask // ((1 << step) + 1)
            a = ((a >> dtype(step)) & dtype(low)) | ((a & dtype(low)) << dtype(step))
            step //= 2
        return a

    return uniform_alu(instruction, function, kind)


@alu("dp4a")
def _dp4a(instruction: Instruction) -> Alu:
    first, second = type_mods(instruction)
    result, a, b, c = instruction.operands
    views = [np.uint8 if kind == "u32" else np.int8 for kind in (first, second)]
    total = "s32" if "s32" in (first, second) else "u32"

    def function(x: Array, y: Array, z: Array) -> Array:
        left, right = (np.ascontiguousarray(v).view(t).reshape(-1, 4) for v, t in zip((x, y), views, strict=True))
        return (left.astype(np.int64) * right).sum(axis=1) + z

    return Alu(function, ((a, "b32"), (b, "b32"), (c, total)), ((result, total),))


def _identity(a: Array) -> Array:
    return a


@alu("mov")
def _mov(instruction: Instruction) -> Alu:
    kind = only_type(instruction)
    result, source = instruction.operands
    if isinstance(source, Vec):
        return _pack(result, source, kind)
    if isinstance(result, Vec):
        return _unpack(result, source, kind)
    return Alu(_identity, ((source, kind),), ((result, kind),))


def _part(kind: str, count: int) -> str:
    return f"b{bits_of(kind) // count}"


def _pack(result: Operand, source: Vec, kind: str) -> Alu:
    part = _part(kind, len(source.items))
    dtype, width = DTYPES["b" + kind[1:]], bits_of(part)

    def function(*parts: Array) -> Array:
        value = parts[0].astype(dtype)
        for i, piece in enumerate(parts[1:], 1):
            value = value | (piece.astype(dtype) << dtype(width * i))
        return value

    return Alu(function, tuple((item, part) for item in source.items), ((result, "b" + kind[1:]),))


def _unpack(result: Vec, source: Operand, kind: str) -> Alu:
    part = _part(kind, len(result.items))
    dtype, width = DTYPES["b" + kind[1:]], bits_of(part)
    narrow = DTYPES[part]

    def function(value: Array) -> tuple[Array, ...]:
        return tuple((value >> dtype(width * i)).astype(narrow) for i in range(len(result.items)))

    return Alu(function, ((source, "b" + kind[1:]),), tuple((item, part) for item in result.items))


SHARED_WINDOW = 1 << 40  # generic addresses of shared and local memory; global ones lie far above
LOCAL_WINDOW = 2 << 40


@alu("cvta")
def _cvta(instruction: Instruction) -> Alu:
    kind = only_type(instruction)
    allow(instruction, "to", "global", "shared", "local", "const", "param")
    base = SHARED_WINDOW if "shared" in instruction.mods else LOCAL_WINDOW if "local" in instruction.mods else 0
    if not base:
        return uniform_alu(instruction, _identity, kind)
    operation = np.subtract if "to" in instruction.mods else np.add
    return uniform_alu(instruction, lambda a: operation(a, np.uint64(base)), kind)


@alu("isspacep")
def _isspacep(instruction: Instruction) -> Alu:
    space = instruction.mods[0]
    window = {"shared": 1, "local": 2}.get(space.split("_")[0])
    if window is None and space != "global":
        raise unsupported(instruction)
    shift = np.uint64(40)
    if window is None:
        return uniform_alu(instruction, lambda a: (a >> shift) > 2, "b64", "pred")
    return uniform_alu(instruction, lambda a: (a >> shift) == window, "b64", "pred")
