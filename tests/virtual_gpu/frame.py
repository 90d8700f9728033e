"""Registers of a set of CTAs as NumPy arrays, and lane-wise instructions bound to them.

A lane is a thread; each CTA is padded to whole warps. Registers that are the same in all threads have one element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from virtual_gpu.alu import DTYPES, Alu, Array
from virtual_gpu.faults import GpuFault, UnsupportedPtx
from virtual_gpu.program import UNIFORM_SPECIALS, Kernel
from virtual_gpu.ptx import TYPE_BYTES, Imm, Instruction, Operand, Reg, Sink, Special, Sym

Lanes = Any  # int64 array of lane numbers, ascending
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(slots=True)
class Bound:
    """An instruction on a frame's arrays: `full()` for all lanes, `part(lanes)` for some.

    `pure` ones may run on all lanes even where some have exited: nobody sees what they leave there. `masked(mask)`,
    where there is one, computes all lanes and keeps the masked: cheaper than `part` where many lanes are active.
    """

    full: Callable[[], Any]
    part: Callable[[Lanes], Any]
    pure: bool
    masked: Callable[[Array], Any] | None = None


class Frame:
    """Storage for `num_ctas` CTAs of one kernel, reused by launches of the same geometry."""

    def __init__(self, kernel: Kernel, num_ctas: int, block: tuple[int, int, int]) -> None:
        self.kernel, self.num_ctas, self.block = kernel, num_ctas, block
        self.threads = block[0] * block[1] * block[2]
        self.padded = -(-self.threads // 32) * 32
        self.num_lanes = num_ctas * self.padded
        self.num_warps = self.num_lanes // 32
        self.all_lanes = np.arange(self.num_lanes, dtype=np.int64)
        self.cta_of_lane = self.all_lanes // self.padded
        self.params = np.zeros(max(4096, kernel.param_bytes), np.uint8)
        self.registers: dict[str, Array] = {}
        self.specials = self._make_specials()
        self.lanes: Lanes = self.all_lanes  # active now
        self.launch: Any = None
        self.shared: Any = None
        self.local = np.zeros(self.num_lanes * max(16, kernel.local_bytes), np.uint8)
        self.local_written = np.zeros_like(self.local)

    def _make_specials(self) -> dict[str, Array]:
        thread = self.all_lanes % self.padded
        x, y, _ = self.block
        lane = thread & 31
        one = np.uint32(1)
        bit = one << lane.astype(np.uint32)
        table = {
            "%tid.x": thread % x,
            "%tid.y": thread // x % y,
            "%tid.z": thread // (x * y),
            "%laneid": lane,
            "%warpid": thread // 32,
            "%nwarpid": np.full(1, self.padded // 32),
            "%lanemask_eq": bit,
            "%lanemask_lt": bit - one,
            "%lanemask_le": bit - one + bit,
            "%lanemask_gt": ~(bit - one + bit),
            "%lanemask_ge": ~(bit - one),
            "%smid": self.cta_of_lane % 108,
            "%nsmid": np.full(1, 108),
            "WARP_SZ": np.full(1, 32),
        }
        for axis, size in zip("xyz", self.block, strict=True):
            table[f"%ntid.{axis}"] = np.full(1, size)
            table[f"%ctaid.{axis}"] = np.zeros(self.num_lanes)
            table[f"%nctaid.{axis}"] = np.ones(1)
        for name in ("%dynamic_smem_size", "%total_smem_size", "%gridid"):
            table[name] = np.zeros(1)
        arrays = {name: np.ascontiguousarray(a.astype(np.uint32)) for name, a in table.items()}
        for name in ("%clock", "%clock_hi"):
            arrays[name] = np.zeros(self.num_lanes, np.uint32)
        for name in ("%clock64", "%globaltimer"):
            arrays[name] = np.zeros(self.num_lanes, np.uint64)
        return arrays

    def place(self, first_cta: int, grid: tuple[int, int, int]) -> None:
        """Set the CTA coordinates for CTAs [first_cta, first_cta + num_ctas) of the grid."""
        cta = self.cta_of_lane + first_cta
        self.specials["%ctaid.x"][:] = cta % grid[0]
        self.specials["%ctaid.y"][:] = cta // grid[0] % grid[1]
        self.specials["%ctaid.z"][:] = cta // (grid[0] * grid[1])
        for axis, size in zip("xyz", grid, strict=True):
            self.specials[f"%nctaid.{axis}"][:] = size

    def storage(self, name: str) -> Array:
        """A register's own array."""
        if name not in self.registers:
            kind = self.kernel.registers.get(name)
            if kind is None:
                raise UnsupportedPtx(f"kernel {self.kernel.name}: undeclared register {name}")
            dtype = np.bool_ if kind == "pred" else np.dtype(f"u{TYPE_BYTES[kind]}")
            self.registers[name] = np.zeros(1 if name in self.kernel.uniform else self.num_lanes, dtype)
        return self.registers[name]

    def read(self, operand: Operand, kind: str) -> Array:
        """A view of an operand as `kind`: one element where all lanes agree, else one a lane."""
        if isinstance(operand, Reg):
            view = _as_kind(self.storage(operand.name), kind)
            return ~view if operand.negated else view
        if isinstance(operand, Special):
            if operand.name not in self.specials:
                raise UnsupportedPtx(f"kernel {self.kernel.name}: special register {operand.name}")
            return _as_kind(self.specials[operand.name], kind)
        if isinstance(operand, Imm):
            return immediate(operand, kind)
        if isinstance(operand, Sym):
            return immediate(Imm(self.kernel.address_of(operand)), kind)
        raise UnsupportedPtx(f"kernel {self.kernel.name}: operand {operand} as .{kind}")

    def write_view(self, operand: Operand, kind: str) -> Array | None:
        """The view that a result of `kind` is assigned to; wider registers take it extended. None for `_`."""
        if isinstance(operand, Sink):
            return None
        assert isinstance(operand, Reg)
        storage = self.storage(operand.name)
        if kind == "pred" or "x2" in kind or storage.itemsize == TYPE_BYTES[kind]:
            return _as_kind(storage, kind)
        return storage.view(_SIGNED[storage.itemsize] if kind[0] == "s" else f"u{storage.itemsize}")

    def lane_name(self, lane: int) -> str:
        """Name a lane's CTA and thread by their coordinates."""
        names = self.specials
        cta = ",".join(str(int(names[f"%ctaid.{a}"][lane])) for a in "xyz")
        thread = ",".join(str(int(names[f"%tid.{a}"][lane])) for a in "xyz")
        return f"CTA ({cta}) thread ({thread})"

    def fault(
        self, kind: str, message: str, instruction: Instruction, lane: int | None = None, address: int | None = None
    ) -> GpuFault:
        thread = "" if lane is None else self.lane_name(lane)
        return GpuFault(
            kind, message, self.kernel.name, instruction.line, instruction.text, instruction.source, thread, address
        )


def _as_kind(array: Array, kind: str) -> Array:
    if kind == "pred" or array.dtype == np.bool_:
        return array
    dtype = np.dtype(DTYPES[kind])
    if "x2" in kind:
        return array.view(dtype).reshape(-1, 2)
    width = TYPE_BYTES[kind]
    if array.itemsize == width:
        return array.view(dtype)
    if array.itemsize > width:
        return array.view(dtype)[:: array.itemsize // width]  # little-endian: the low part
    raise UnsupportedPtx(f"a {array.itemsize}-byte register used as .{kind}")


def immediate(value: Imm, kind: str) -> Array:
    """An immediate as an array of one element."""
    if kind == "pred":
        return np.array([bool(value.value)])
    width = TYPE_BYTES[kind]
    if value.is_float:
        number = np.array([value.value], f"u{value.is_float // 8}").view(f"f{value.is_float // 8}")
        if kind in ("f32", "f64", "f16"):
            return number.astype(DTYPES[kind])
        if value.is_float == 64 and width == 4:
            number = number.astype(np.float32)
        return number.view(f"u{number.itemsize}").view(DTYPES[kind])
    if kind in ("f32", "f64"):
        return np.array([value.value], DTYPES[kind])
    bits = np.array([value.value & ((1 << (8 * width)) - 1)], f"u{width}")
    view = bits.view(DTYPES[kind])
    return view.reshape(-1, 2) if "x2" in kind else view


def bind_alu(frame: Frame, alu: Alu) -> Bound:
    """Bind a lane-wise instruction."""
    negations = [isinstance(o, Reg) and o.negated for o, _ in alu.sources]
    sources = [frame.read(Reg(o.name) if isinstance(o, Reg) and o.negated else o, kind) for o, kind in alu.sources]
    function = _negating(alu.function, negations) if any(negations) else alu.function
    results = [frame.write_view(o, kind) for o, kind in alu.results]
    if len(results) == 1:
        return _bind_single(function, sources, results[0])
    return _bind_several(function, sources, results)


def _negating(function: Callable[..., Any], negations: list[bool]) -> Callable[..., Any]:
    return lambda *a: function(*(~x if n else x for x, n in zip(a, negations, strict=True)))


def _bind_single(function: Callable[..., Any], sources: list[Array], target: Array) -> Bound:
    is_ufunc = hasattr(function, "nin") and all(s.dtype == target.dtype for s in sources)
    is_compare = target.dtype == np.bool_ and isinstance(function, np.ufunc)
    if (is_ufunc or is_compare) and target.flags.c_contiguous:
        full: Callable[[], Any] = partial(function, *sources, out=target)
    else:

        def full() -> None:
            target[...] = function(*sources)

    if len(target) == 1:
        return Bound(full, lambda _: full(), True, lambda _: full())
    is_wide = [len(s) > 1 for s in sources]

    def part(lanes: Lanes) -> None:
        target[lanes] = function(*[s[lanes] if wide else s for s, wide in zip(sources, is_wide, strict=True)])

    def masked(mask: Array) -> None:
        np.copyto(target, function(*sources), where=mask if target.ndim == 1 else mask[:, None], casting="unsafe")

    return Bound(full, part, True, masked)


def _bind_several(function: Callable[..., Any], sources: list[Array], targets: list[Array | None]) -> Bound:
    def full() -> None:
        for target, value in zip(targets, function(*sources), strict=True):
            if target is not None:
                target[...] = value

    if all(t is None or len(t) == 1 for t in targets):
        return Bound(full, lambda _: full(), True, lambda _: full())

    def masked(mask: Array) -> None:
        for target, value in zip(targets, function(*sources), strict=True):
            if target is not None:
                np.copyto(target, value, where=mask, casting="unsafe")

    def part(lanes: Lanes) -> None:
        for target, value in zip(targets, function(*[s[lanes] if len(s) > 1 else s for s in sources]), strict=True):
            if target is not None:
                target[lanes] = value

    return Bound(full, part, True, masked)


def bind_guard(frame: Frame, guard: Reg, inner: Bound) -> Bound:
    """Run `inner` only on the lanes whose predicate holds."""
    predicate = frame.storage(guard.name)

    def holds(values: Array) -> Array:
        return ~values if guard.negated else values

    def full() -> None:
        condition = np.broadcast_to(holds(predicate), (frame.num_lanes,))
        if condition.all():
            inner.full()
        elif inner.masked is not None:
            inner.masked(condition)
        elif (lanes := np.flatnonzero(condition)).size:
            inner.part(lanes)

    def part(lanes: Lanes) -> None:
        chosen = lanes[holds(predicate[lanes])] if len(predicate) > 1 else lanes if holds(predicate)[0] else lanes[:0]
        if chosen.size:
            inner.part(chosen)

    within = inner.masked

    def masked(mask: Array) -> None:
        if within is not None:
            within(holds(predicate) & mask)

    return Bound(full, part, inner.pure, masked if within is not None else None)


__all__ = ["UNIFORM_SPECIALS", "Bound", "Frame", "Lanes", "bind_alu", "bind_guard", "immediate"]
