"""Comparisons and selections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from virtual_gpu import floats
from virtual_gpu.alu import Alu, alu, is_float, only_type, type_mods, uniform_alu, unsupported
from virtual_gpu.ptx import Instruction, Pair

Function = Callable[..., Any]

_COMPARE: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    "equ": np.not_equal, "neu": np.equal, "ltu": np.greater_equal, "leu": np.greater, "gtu": np.less_equal,
    "geu": np.less,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip
_UNORDERED = frozenset(("equ", "neu", "ltu", "leu", "gtu", "geu"))
_COMBINE: dict[str, Function] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(instruction: Instruction, kind: str) -> Function:
    """The comparison of setp and set as a function of two arrays of `kind`."""
    name = instruction.mods[0]
    compare = _COMPARE[name]
    if is_float(kind):
        if name == "ne":  # ordered: false where either is NaN
            function: Function = lambda a, b: np.less(a, b) | np.greater(a, b)  # noqa: E731
        elif name == "equ":
            function = lambda a, b: ~(np.less(a, b) | np.greater(a, b))  # noqa: E731
        elif name == "neu":
            function = np.not_equal
        else:
            function = (lambda a, b: ~compare(a, b)) if name in _UNORDERED else compare
        if "ftz" in instruction.mods and kind == "f32":
            ordered = function
            function = lambda a, b: ordered(floats.flush(a), floats.flush(b))  # noqa: E731
        if kind in ("bf16", "bf16x2"):
            exact = function
            function = lambda a, b: exact(floats.from_bf16(a), floats.from_bf16(b))  # noqa: E731
        return function
    return compare


@alu("setp")
def _setp(instruction: Instruction) -> Alu:
    kind = only_type(instruction)
    function = comparison(instruction, kind)
    first, *rest = instruction.operands
    sources = [(rest[0], kind), (rest[1], kind)]
    combine = next((_COMBINE[m] for m in instruction.mods[1:] if m in _COMBINE), None)
    if combine is not None:
        sources.append((rest[2], "pred"))
        plain = function
        function = lambda a, b, c: combine(plain(a, b), c)  # noqa: E731
    if not isinstance(first, Pair):
        if kind in ("f16x2", "bf16x2"):
            raise unsupported(instruction, "one predicate for two elements")
        return Alu(function, tuple(sources), ((first, "pred"),))
    results = ((first.first, "pred"), (first.second, "pred"))
    if kind in ("f16x2", "bf16x2"):
        return Alu(lambda a, b: tuple(function(a, b).T), tuple(sources), results)
    if combine is None:
        return Alu(lambda a, b: (t := function(a, b), ~t), tuple(sources), results)
    both = plain
    return Alu(lambda a, b, c: (combine(both(a, b), c), combine(~both(a, b), c)), tuple(sources), results)


@alu("set")
def _set(instruction: Instruction) -> Alu:
    result, kind = type_mods(instruction)[-2:]
    if len(instruction.operands) != 3:
        raise unsupported(instruction, "combined set")
    function = comparison(instruction, kind)
    if result == "f32":
        return uniform_alu(instruction, lambda a, b: function(a, b).astype(np.float32), kind, "f32")
    if kind in ("f16x2", "bf16x2"):
        if result in ("f16x2", "bf16x2"):
            one = np.uint16(0x3C00 if result == "f16x2" else 0x3F80)
            values = lambda a, b: function(a, b).astype(np.uint16) * one  # noqa: E731
        else:
            values = lambda a, b: function(a, b).astype(np.uint16) * np.uint16(0xFFFF)  # noqa: E731
        return uniform_alu(instruction, values, kind, "bf16x2")
    if result in ("f16", "bf16"):
        one = np.uint16(0x3C00 if result == "f16" else 0x3F80)
        return uniform_alu(instruction, lambda a, b: function(a, b).astype(np.uint16) * one, kind, "b16")
    return uniform_alu(instruction, lambda a, b: -function(a, b).astype(np.int64), kind, result.replace("u", "s"))


@alu("selp")
def _selp(instruction: Instruction) -> Alu:
    kind = only_type(instruction)
    result, a, b, choice = instruction.operands
    return Alu(np.where, ((choice, "pred"), (a, kind), (b, kind)), ((result, kind),))


@alu("slct")
def _slct(instruction: Instruction) -> Alu:
    kind, condition = type_mods(instruction)
    result, a, b, c = instruction.operands
    return Alu(lambda x, y, z: np.where(z >= 0, x, y), ((a, kind), (b, kind), (c, condition)), ((result, kind),))
