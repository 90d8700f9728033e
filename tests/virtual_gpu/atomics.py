"""atom and red, one lane after another in ascending order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from virtual_gpu import checks
from virtual_gpu.access import ACCESS, address_reader, space_of, split_generic, value_reader, words_of
from virtual_gpu.alu import DTYPES, Array, only_type, unsupported
from virtual_gpu.frame import Bound, Frame, Lanes
from virtual_gpu.ptx import TYPE_BYTES, Instruction, Mem

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda old, b: old + b,
    "min": lambda old, b: min(old, b),
    "max": lambda old, b: max(old, b),
    "and": lambda old, b: old & b,
    "or": lambda old, b: old | b,
    "xor": lambda old, b: old ^ b,
    "exch": lambda old, b: b,
    "cas": lambda old, b, c: c if old == b else old,
    "inc": lambda old, b: old * 0 if old >= b else old + old.dtype.type(1),
    "dec": lambda old, b: b if old == 0 or old > b else old - old.dtype.type(1),
}
_MODS = frozenset(
    ("global", "shared", "shared_cta", "relaxed", "acquire", "release", "acq_rel", "gpu", "cta", "sys", "noftz")
)


def bind_atomic(frame: Frame, instruction: Instruction, row: int) -> Bound:
    kind = only_type(instruction)
    name = next((m for m in instruction.mods if m in _OPERATIONS), None)
    unknown = [m for m in instruction.mods if m not in _MODS and m not in DTYPES and m not in _OPERATIONS]
    if name is None or unknown or kind in ("bf16", "bf16x2"):
        raise unsupported(instruction, " ".join(unknown))
    operands = list(instruction.operands)
    target = frame.write_view(operands.pop(0), kind) if instruction.base == "atom" else None
    address = operands.pop(0)
    assert isinstance(address, Mem)
    space = space_of(frame, instruction, address)
    read_address = address_reader(frame, address, space)
    raw_width = TYPE_BYTES[kind]
    read_values = value_reader(frame, tuple(operands), raw_width)
    dtype, operation = np.dtype(DTYPES[kind]), _OPERATIONS[name]

    def apply(where: str, lanes: Lanes, addresses: Array, values: Array) -> Array:
        offsets = ACCESS[where](frame, instruction, row, lanes, addresses, raw_width, checks.ATOMIC)
        memory = words_of(frame, where)[raw_width]
        old = np.empty((lanes.size, 1), memory.dtype)
        shift = raw_width.bit_length() - 1
        for i, offset in enumerate(offsets):
            cell = memory[(offset >> shift) : (offset >> shift) + 1]
            old[i] = cell
            typed = cell.view(dtype)
            arguments = [values[i, k : k + 1].view(dtype) for k in range(values.shape[1])]
            if "x2" in kind:
                typed[:] = operation(typed, *arguments)
            else:
                typed[0] = operation(typed[0], *(a[0] for a in arguments))
        if where == "global":
            frame.launch.order(frame.cta_of_lane[lanes], addresses)
        return old

    def part(lanes: Lanes) -> None:
        addresses, values = read_address(lanes), read_values(lanes)
        if space != "generic":
            old = apply(space, lanes, addresses, values)
        else:
            old = np.empty((lanes.size, 1), f"u{raw_width}")
            for where, chosen, inner in split_generic(lanes, addresses):
                if chosen is None:
                    old = apply(where, lanes, inner, values)
                else:
                    old[chosen] = apply(where, lanes[chosen], inner, values[chosen])
        if target is not None:
            target[lanes] = old.view(target.dtype)[:, 0] if target.ndim == 1 else old.view(target.dtype)

    return Bound(lambda: part(frame.all_lanes), part, False)
