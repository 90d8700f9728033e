"""Vector operations for numba kernels, each emitted as LLVM vector IR.

Inside a kernel a vector is a value like any other: `v = load(address, 16)`, `acc = fma(v, w, acc)`. Widths are
literal ints (16 for AVX-512, 8 for AVX2, 4 for the portable path). Addresses are int64 byte addresses, as
`array.ctypes.data` gives them (keep the array alive outside the kernel). Nothing here is bounds-checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from pagedkv.compute.cpu.simd_emit import (
    F32,
    I32,
    I64,
    KIND_BF16,
    KIND_BYTES,
    KIND_E4M3,
    KIND_F16,
    KIND_F32,
    KIND_I8,
    KIND_U8,
    emit_call,
    emit_exp2,
    emit_float_to_bfloat,
    emit_float_to_e4m3,
    emit_float_to_half,
    emit_float_to_int8,
    emit_fma,
    emit_load_as,
    emit_max,
    emit_min,
    emit_pointer,
    emit_prefetch,
    emit_splat,
    emit_tanh,
    emit_tree,
)

__all__ = [
    "KIND_BF16",
    "KIND_BYTES",
    "KIND_E4M3",
    "KIND_F16",
    "KIND_F32",
    "KIND_I8",
    "KIND_U8",
    "Vector",
    "add",
    "div",
    "exp2",
    "f32_vector",
    "fma",
    "hmax",
    "hsum",
    "keep_lanes",
    "lane_numbers",
    "literal",
    "load",
    "load_as",
    "load_f32",
    "load_f64",
    "load_i32",
    "load_i64",
    "mul",
    "prefetch",
    "select_less",
    "splat",
    "store",
    "store_as",
    "store_f32",
    "store_i64",
    "sub",
    "tanh",
    "vabs",
    "vmax",
    "vmin",
]


class Vector(types.Type):  # type: ignore[misc]
    """Type of a vector of `width` float32 ("f32"), int32 ("i32") or lane masks ("i1")."""

    def __init__(self, element: str, width: int) -> None:
        self.element = element
        self.width = width
        super().__init__(f"Vector({element}, {width})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        element = {"f32": F32, "i32": I32, "i1": ir.IntType(1)}[vector.element]
        super().__init__(manager, vector, ir.VectorType(element, vector.width))


def f32_vector(width: int) -> Vector:
    """Return the type of a vector of float32."""
    return Vector("f32", width)


def literal(value: Any) -> int:
    """Return the value of a literal int type; a kernel passed something that varies otherwise."""
    if not isinstance(value, types.IntegerLiteral):
        raise TypeError(f"a literal int is needed here, got {value}")
    return int(value.literal_value)


@intrinsic(prefer_literal=True)
def load(typingctx: Any, address: Any, width: Any) -> Any:
    """Return the float32 vector at the address (4-byte aligned)."""
    lanes = literal(width)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_load_as(builder, args[0], None, lanes, KIND_F32)

    return f32_vector(lanes)(types.int64, width), codegen


@intrinsic(prefer_literal=True)
def load_as(typingctx: Any, address: Any, width: Any, kind: Any) -> Any:
    """Return `width` stored elements of a kind as a float32 vector."""
    lanes, stored = literal(width), literal(kind)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_load_as(builder, args[0], None, lanes, stored)

    return f32_vector(lanes)(types.int64, width, kind), codegen


@intrinsic
def store(typingctx: Any, address: Any, vector: Any) -> Any:
    """Store a vector (4-byte aligned)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], emit_pointer(builder, args[0]), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, vector), codegen


@intrinsic(prefer_literal=True)
def splat(typingctx: Any, scalar: Any, width: Any) -> Any:
    """Return a float32 vector with every lane equal to the scalar."""
    lanes = literal(width)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_splat(builder, args[0], lanes)

    return f32_vector(lanes)(types.float32, width), codegen


def _elementwise(emit: Callable[..., Any], num_args: int) -> Callable[..., Any]:
    """Return the typing and code generation of an operation whose arguments and result are one vector type."""

    def typed(vector: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, *args)

        return vector(*[vector] * num_args), codegen

    return typed


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, fused where the machine can."""
    return _elementwise(emit_fma, 3)(a)


@intrinsic
def add(typingctx: Any, a: Any, b: Any) -> Any:
    """Return a + b."""
    return _elementwise(lambda builder, x, y: builder.fadd(x, y), 2)(a)


@intrinsic
def sub(typingctx: Any, a: Any, b: Any) -> Any:
    """Return a - b."""
    return _elementwise(lambda builder, x, y: builder.fsub(x, y), 2)(a)


@intrinsic
def mul(typingctx: Any, a: Any, b: Any) -> Any:
    """Return a * b."""
    return _elementwise(lambda builder, x, y: builder.fmul(x, y), 2)(a)


@intrinsic
def div(typingctx: Any, a: Any, b: Any) -> Any:
    """Return a / b."""
    return _elementwise(lambda builder, x, y: builder.fdiv(x, y), 2)(a)


@intrinsic
def vmax(typingctx: Any, a: Any, b: Any) -> Any:
    """Return the larger of a and b per lane; b where either is NaN."""
    return _elementwise(emit_max, 2)(a)


@intrinsic
def vmin(typingctx: Any, a: Any, b: Any) -> Any:
    """Return the smaller of a and b per lane; b where either is NaN."""
    return _elementwise(emit_min, 2)(a)


@intrinsic
def vabs(typingctx: Any, a: Any) -> Any:
    """Return |a|."""
    return _elementwise(lambda builder, x: emit_call(builder, f"llvm.fabs.v{x.type.count}f32", x.type, [x]), 1)(a)


@intrinsic
def exp2(typingctx: Any, a: Any) -> Any:
    """Return 2**a per lane, relative error below 2e-7; exactly 0 below 2**-126."""
    return _elementwise(emit_exp2, 1)(a)


@intrinsic
def tanh(typingctx: Any, a: Any) -> Any:
    """Return tanh(a) per lane, relative error below 2e-7."""
    return _elementwise(emit_tanh, 1)(a)


@intrinsic
def select_less(typingctx: Any, a: Any, b: Any, if_less: Any, otherwise: Any) -> Any:
    """Return if_less where a < b and otherwise elsewhere (NaN included)."""

    def emit(builder: Any, x: Any, y: Any, yes: Any, no: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", x, y), yes, no)

    return _elementwise(emit, 4)(a)


@intrinsic
def keep_lanes(typingctx: Any, vector: Any, first: Any, stop: Any, otherwise: Any) -> Any:
    """Return the vector's lanes in [first, stop) (int64, any range) and the scalar `otherwise` in all others."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = args[0].type.count
        lanes = ir.Constant(ir.VectorType(I64, width), list(range(width)))
        above = builder.icmp_signed(">=", lanes, emit_splat(builder, args[1], width))
        below = builder.icmp_signed("<", lanes, emit_splat(builder, args[2], width))
        return builder.select(builder.and_(above, below), args[0], emit_splat(builder, args[3], width))

    return vector(vector, types.int64, types.int64, types.float32), codegen


@intrinsic(prefer_literal=True)
def lane_numbers(typingctx: Any, width: Any) -> Any:
    """Return 0.0, 1.0, 2.0, ... as a float32 vector."""
    lanes = literal(width)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(ir.VectorType(F32, lanes), [float(lane) for lane in range(lanes)])

    return f32_vector(lanes)(width), codegen


@intrinsic
def hsum(typingctx: Any, vector: Any) -> Any:
    """Return the sum of all lanes, added pairwise."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_tree(builder, args[0], lambda inner, a, b: inner.fadd(a, b))

    return types.float32(vector), codegen


@intrinsic
def hmax(typingctx: Any, vector: Any) -> Any:
    """Return the largest lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_tree(builder, args[0], emit_max)

    return types.float32(vector), codegen


@intrinsic(prefer_literal=True)
def prefetch(typingctx: Any, address: Any, locality: Any) -> Any:
    """Ask for the cache line at the address; locality 3 is the innermost cache, 0 non-temporal."""
    level = literal(locality)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_prefetch(builder, emit_pointer(builder, args[0]), level)
        return context.get_dummy_value()

    return types.void(types.int64, locality), codegen


def _scalar_load(element: Any, result: Any) -> Callable[..., Any]:
    def typed(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            raw = builder.load(emit_pointer(builder, args[0]), typ=element, align=element.width // 8)
            return builder.sext(raw, I64) if element is I32 else raw

        return result(types.int64), codegen

    return typed


@intrinsic
def load_f32(typingctx: Any, address: Any) -> Any:
    """Return the float32 at the address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(emit_pointer(builder, args[0]), typ=F32, align=4)

    return types.float32(types.int64), codegen


@intrinsic
def load_f64(typingctx: Any, address: Any) -> Any:
    """Return the float64 at the address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(emit_pointer(builder, args[0]), typ=ir.DoubleType(), align=8)

    return types.float64(types.int64), codegen


@intrinsic
def store_f32(typingctx: Any, address: Any, value: Any) -> Any:
    """Store a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], emit_pointer(builder, args[0]), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic
def load_i32(typingctx: Any, address: Any) -> Any:
    """Return the int32 at the address, widened to int64."""
    return _scalar_load(I32, types.int64)(typingctx, address)


@intrinsic
def load_i64(typingctx: Any, address: Any) -> Any:
    """Return the int64 at the address."""
    return _scalar_load(I64, types.int64)(typingctx, address)


@intrinsic
def store_i64(typingctx: Any, address: Any, value: Any) -> Any:
    """Store an int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], emit_pointer(builder, args[0]), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def store_as(typingctx: Any, address: Any, vector: Any, kind: Any) -> Any:
    """Store a float32 vector as a kind, rounded to nearest even.

    NaN stays NaN in the float kinds; KIND_I8 and KIND_E4M3 (not divided by 256 here) need |value| <= 127 and 448.
    """
    stored = literal(kind)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = args[1]
        if stored == KIND_F16:
            value = emit_float_to_half(builder, value)
        elif stored == KIND_BF16:
            value = emit_float_to_bfloat(builder, value)
        elif stored == KIND_I8:
            value = emit_float_to_int8(builder, value)
        elif stored == KIND_E4M3:
            value = emit_float_to_e4m3(builder, value)
        builder.store(value, emit_pointer(builder, args[0]), align=KIND_BYTES[stored])
        return context.get_dummy_value()

    return types.void(types.int64, vector, kind), codegen
