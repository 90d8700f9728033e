"""The shape of a lane-wise instruction, and the register of builders that give each opcode its meaning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from virtual_gpu.faults import UnsupportedPtx
from virtual_gpu.ptx import TYPE_BYTES, Instruction, Operand

Array = Any

DTYPES: dict[str, Any] = {
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8,
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "f16": np.float16, "bf16": np.uint16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32, "tf32": np.uint32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
    "f16x2": np.float16, "bf16x2": np.uint16, "pred": np.bool_,
}  # fmt: skip
TYPE_NAMES = frozenset(DTYPES)
ROUNDINGS = frozenset(("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi"))


@dataclass(frozen=True)
class Alu:
    """`results = function(*sources)` over lanes; each source and result is (operand, PTX type).

    `function` gets arrays of the types' dtypes (two-element types as [lanes, 2]) of length 1 or the number of lanes.
    """

    function: Callable[..., Any]
    sources: tuple[tuple[Operand, str], ...]
    results: tuple[tuple[Operand, str], ...]


Builder = Callable[[Instruction], Alu]
ALU_BUILDERS: dict[str, Builder] = {}


def alu(*names: str) -> Callable[[Builder], Builder]:
    """Register a builder for opcodes."""

    def register(builder: Builder) -> Builder:
        for name in names:
            ALU_BUILDERS[name] = builder
        return builder

    return register


def unsupported(instruction: Instruction, why: str = "") -> UnsupportedPtx:
    return UnsupportedPtx(
        f"PTX line {instruction.line}: `{instruction.text}`: {instruction.opcode} is not modelled"
        + (f" ({why})" if why else "")
    )


def type_mods(instruction: Instruction) -> list[str]:
    return [m for m in instruction.mods if m in TYPE_NAMES]


def only_type(instruction: Instruction) -> str:
    """The instruction's last type."""
    names = type_mods(instruction)
    if not names:
        raise unsupported(instruction, "no type")
    return names[-1]


def allow(instruction: Instruction, *mods: str) -> None:
    """Refuse modifiers that are neither types nor in `mods`: an unknown one may change the meaning."""
    for mod in instruction.mods:
        if mod not in mods and mod not in TYPE_NAMES:
            raise unsupported(instruction, f".{mod}")


def rounding(instruction: Instruction, default: str = "rn") -> str:
    return next((m for m in instruction.mods if m in ROUNDINGS), default)


def is_float(kind: str) -> bool:
    return kind in ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2")


def uniform_alu(instruction: Instruction, function: Callable[..., Any], kind: str, result: str | None = None) -> Alu:
    """All sources of one type, the first operand the result."""
    first, *rest = instruction.operands
    return Alu(function, tuple((o, kind) for o in rest), ((first, result or kind),))


def bits_of(kind: str) -> int:
    return 8 * TYPE_BYTES[kind]
