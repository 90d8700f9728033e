"""Which function binds which instruction, and blocks of bound instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from virtual_gpu import access, async_copy, atomics, matrix, warp
from virtual_gpu.alu import unsupported
from virtual_gpu.frame import Bound, Frame, Lanes, bind_alu, bind_guard
from virtual_gpu.program import Kernel, is_warp_barrier
from virtual_gpu.ptx import Instruction

Binder = Callable[[Frame, Instruction, int], Bound]
BINDERS: dict[str, Binder] = {
    "ld": access.bind_load,
    "ldu": access.bind_load,
    "st": access.bind_store,
    "atom": atomics.bind_atomic,
    "red": atomics.bind_atomic,
    "cp": async_copy.bind_cp,
    "membar": access.bind_nothing,
    "fence": access.bind_nothing,
    "prefetch": access.bind_nothing,
    "prefetchu": access.bind_nothing,
    "nanosleep": access.bind_nothing,
    "griddepcontrol": access.bind_nothing,
    "shfl": warp.bind_shuffle,
    "vote": warp.bind_vote,
    "activemask": warp.bind_active_mask,
    "redux": warp.bind_redux,
    "ldmatrix": matrix.bind_ldmatrix,
    "mma": matrix.bind_mma,
    "bar": warp.bind_warp_barrier,
    "barrier": warp.bind_warp_barrier,
}


def bind(frame: Frame, instruction: Instruction, row: int) -> Bound:
    """Bind one instruction that is not control flow. Raises UnsupportedPtx."""
    alu = frame.kernel.alus.get(id(instruction))
    if alu is not None:
        bound = bind_alu(frame, alu)
    elif instruction.base in BINDERS:
        bound = BINDERS[instruction.base](frame, instruction, row)
    else:
        raise unsupported(instruction)
    return bind_guard(frame, instruction.guard, bound) if instruction.guard else bound


class BoundBlock:
    """A block's instructions for all lanes (`full`), all live lanes (`live`), many (`masked`) and few (`part`)."""

    def __init__(self, frame: Frame, start: int, end: int) -> None:
        body, skipped = frame.kernel.body, frame.kernel.skipped
        bounds = [bind(frame, body[k], k) for k in range(start, end) if id(body[k]) not in skipped]
        self.full = [b.full for b in bounds]
        self.part = [b.part for b in bounds]
        self.live = [b.full if b.pure else _on_lanes(frame, b.part) for b in bounds]
        self.masked = [(b.masked or b.part, b.masked is not None) for b in bounds]


def _on_lanes(frame: Frame, part: Callable[[Lanes], Any]) -> Callable[[], Any]:
    return lambda: part(frame.lanes)


def check_supported(kernel: Kernel) -> None:
    """Bind every instruction once, so that what is not modelled is refused when the module is loaded."""
    frame = Frame(kernel, 1, (32, 1, 1))
    for row, instruction in enumerate(kernel.body):
        if instruction.base in ("bra", "brx", "ret", "exit", "trap"):
            continue
        if instruction.base in ("bar", "barrier") and not is_warp_barrier(instruction):
            continue
        bind(frame, instruction, row)
