"""A kernel ready to run: calls inlined, memory laid out, constants folded, instructions cut into basic blocks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from virtual_gpu import arithmetic, comparison, convert, logic  # noqa: F401  (they register their opcodes)
from virtual_gpu.alu import ALU_BUILDERS, Alu, unsupported
from virtual_gpu.faults import UnsupportedPtx
from virtual_gpu.ptx import (
    Function,
    Imm,
    Instruction,
    Label,
    Mem,
    Operand,
    Pair,
    PtxModule,
    Reg,
    Special,
    Sym,
    Vec,
)

CONTROL = frozenset(("bra", "brx", "ret", "exit", "bar", "barrier", "trap"))
UNIFORM_SPECIALS = frozenset(f"%{name}.{axis}" for name in ("ntid", "nctaid") for axis in "xyz") | frozenset(
    ("%dynamic_smem_size", "%total_smem_size", "WARP_SZ", "%gridid")
)


@dataclass
class Block:
    """Instructions [start, end) without control flow, and what ends them (None: fall through)."""

    start: int
    end: int
    terminator: Instruction | None
    targets: list[int] = field(default_factory=list)  # block numbers of a branch


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def is_warp_barrier(instruction: Instruction) -> bool:
    return instruction.base in ("bar", "barrier") and "warp" in instruction.mods


def registers_of(operand: Operand) -> list[str]:
    if isinstance(operand, Reg):
        return [operand.name]
    if isinstance(operand, Mem):
        return registers_of(operand.base)
    if isinstance(operand, Vec):
        return [name for item in operand.items for name in registers_of(item)]
    if isinstance(operand, Pair):
        return [*registers_of(operand.first), *registers_of(operand.second)]
    return []


class Kernel:
    """One entry function of a module, lowered. `symbols` maps module variables to device addresses."""

    def __init__(self, module: PtxModule, function: Function, symbols: dict[str, int]) -> None:
        self.name = function.name
        self.max_threads = function.max_threads
        self.registers = dict(function.registers)
        self.labels = dict(function.labels)
        self.tables = dict(function.tables)
        self.variables = {**module.variables, **function.variables}
        self.symbols = symbols
        self.body = [replace(i) for i in function.body]
        self._inline_calls(module)
        self._lay_out(function)
        self.writers: dict[str, list[Instruction]] = {}
        for instruction in self.body:
            for name in self._results(instruction):
                self.writers.setdefault(name, []).append(instruction)
        self._fold_constants()
        self.alus: dict[int, Alu] = {}
        self.skipped = self._find_skipped()
        for instruction in self.body:
            if instruction.base in ALU_BUILDERS:
                self.alus[id(instruction)] = self._build(instruction)
        self.uniform = self._find_uniform()
        self.blocks = self._cut_blocks()
        self.counts: dict[int, int] = {}
        self.frames: dict[Any, Any] = {}

    def _build(self, instruction: Instruction) -> Alu:
        try:
            return ALU_BUILDERS[instruction.base](instruction)
        except (KeyError, ValueError, AssertionError) as error:
            raise unsupported(instruction, repr(error)) from error

    def _results(self, instruction: Instruction) -> list[str]:
        if not instruction.operands or (
            instruction.base in ("st", "red", *CONTROL)
            and instruction.base
            not in (
                "bar",
                "barrier",
            )
        ):
            return []
        return registers_of(instruction.operands[0]) if not isinstance(instruction.operands[0], Mem) else []

    # calls

    def _inline_calls(self, module: PtxModule) -> None:
        site = 0
        while any(i.base == "call" for i in self.body):
            index = next(k for k, i in enumerate(self.body) if i.base == "call")
            site += 1
            if site > 500:
                raise UnsupportedPtx(f"kernel {self.name}: recursive calls are not modelled")
            self._inline(module, index, site)

    def _inline(self, module: PtxModule, index: int, site: int) -> None:
        call = self.body[index]
        operands = list(call.operands)
        results = list(operands.pop(0).items) if isinstance(operands[0], Vec) else []  # type: ignore[union-attr]
        target = operands.pop(0)
        arguments = list(operands[0].items) if operands and isinstance(operands[0], Vec) else []
        name = target.name if isinstance(target, Sym) else ""
        if name in ("__assertfail", "__assert_fail"):
            self._splice(index, [replace(call, base="trap", mods=("assert",), operands=())])
            return
        function = module.functions.get(name)
        if function is None:
            raise unsupported(call, f"call of {target}")
        names = {p.name: a.name for p, a in zip(function.params, arguments, strict=True)}  # type: ignore[union-attr]
        names |= {p.name: a.name for p, a in zip(function.results, results, strict=True)}  # type: ignore[union-attr]
        mark = f"#{site}"
        self.registers |= {n + mark: t for n, t in function.registers.items()}
        for variable in function.variables.values():
            names[variable.name] = variable.name + mark
            self.variables[variable.name + mark] = replace(variable, name=variable.name + mark)
        end = f"$end{mark}"
        body = [self._rename(i, names, mark, end) for i in function.body]
        self._splice(index, body)
        self.labels |= {n + mark: k + index for n, k in function.labels.items()}
        self.labels[end] = index + len(body)
        self.tables |= {n + mark: [t + mark for t in targets] for n, targets in function.tables.items()}

    def _splice(self, index: int, body: list[Instruction]) -> None:
        shift = len(body) - 1
        self.body[index : index + 1] = body
        self.labels = {n: k + shift if k > index else k for n, k in self.labels.items()}

    def _rename(self, instruction: Instruction, names: dict[str, str], mark: str, end: str) -> Instruction:
        def renamed(operand: Operand) -> Operand:
            if isinstance(operand, Reg):
                return replace(operand, name=operand.name + mark)
            if isinstance(operand, Label):
                return Label(operand.name + mark)
            if isinstance(operand, Sym):
                return replace(operand, name=names.get(operand.name, operand.name))
            if isinstance(operand, Mem):
                return replace(operand, base=renamed(operand.base))
            if isinstance(operand, Vec):
                return Vec(tuple(renamed(i) for i in operand.items))
            if isinstance(operand, Pair):
                return Pair(renamed(operand.first), renamed(operand.second))
            return operand

        guard = replace(instruction.guard, name=instruction.guard.name + mark) if instruction.guard else None
        if instruction.base == "ret":
            return replace(instruction, base="bra", mods=("uni",), operands=(Label(end),), guard=guard)
        return replace(instruction, operands=tuple(renamed(o) for o in instruction.operands), guard=guard)

    # memory

    def _lay_out(self, function: Function) -> None:
        offset = 0
        self.params: dict[str, int] = {}
        self.param_sizes: list[tuple[int, int]] = []
        for param in function.params:
            offset = _align(offset, param.align)
            self.params[param.name] = offset
            self.param_sizes.append((offset, param.size))
            offset += param.size
        self.param_bytes = offset
        self.offsets: dict[str, int] = {}  # shared and local variables
        sizes = {"shared": 0, "local": 0}
        extern = [v for v in self.variables.values() if v.space == "shared" and v.size == 0]
        for variable in self.variables.values():
            space = "local" if variable.space == "param" else variable.space
            if space not in sizes or variable in extern:
                continue
            sizes[space] = _align(sizes[space], variable.align)
            self.offsets[variable.name] = sizes[space]
            sizes[space] += variable.size
        alignment = max([16, *(v.align for v in extern)])
        self.static_shared, self.local_bytes = sizes["shared"], _align(sizes["local"], 16)
        self.dynamic_offset = _align(self.static_shared, alignment) if extern else self.static_shared
        self.offsets |= {v.name: self.dynamic_offset for v in extern}

    def address_of(self, symbol: Sym) -> int:
        """Address of a symbol in its own space (generic for module variables)."""
        for table in (self.offsets, self.params, self.symbols):
            if symbol.name in table:
                return table[symbol.name] + symbol.offset
        raise UnsupportedPtx(f"kernel {self.name}: unknown symbol {symbol.name}")

    def space_of(self, symbol: Sym) -> str:
        if symbol.name in self.params:
            return "param"
        space = self.variables[symbol.name].space
        return "local" if space == "param" else space

    # uniform registers

    def _fold_constants(self) -> None:
        """Registers set once, to an immediate or an address, become immediates."""
        values: dict[str, Imm] = {}
        for name, writers in self.writers.items():
            move = writers[0]
            if len(writers) != 1 or move.base != "mov" or move.guard or self.registers.get(name) == "pred":
                continue
            source = move.operands[1]
            if isinstance(source, Imm) and isinstance(move.operands[0], Reg):
                values[name] = source
            elif isinstance(source, Sym):
                values[name] = Imm(self.address_of(source))

        def folded(operand: Operand) -> Operand:
            if isinstance(operand, Reg):
                return values.get(operand.name, operand)
            if isinstance(operand, Mem):
                return replace(operand, base=folded(operand.base))
            if isinstance(operand, Vec):
                return Vec(tuple(folded(i) for i in operand.items))
            return operand

        for instruction in self.body:
            if not instruction.operands:
                continue
            if self._results(instruction):
                first, *rest = instruction.operands
                instruction.operands = (first, *(folded(o) for o in rest))
            else:
                instruction.operands = tuple(folded(o) for o in instruction.operands)

    def _find_skipped(self) -> set[int]:
        """Moves of constants that folding left without a reader."""
        read = {name for i in self.body for o in self._sources(i) for name in registers_of(o)}
        read |= {i.guard.name for i in self.body if i.guard}
        return {
            id(i)
            for i in self.body
            if i.base == "mov" and isinstance(i.operands[0], Reg) and i.operands[0].name not in read
        }

    def _sources(self, instruction: Instruction) -> tuple[Operand, ...]:
        return instruction.operands[1:] if self._results(instruction) else instruction.operands

    def _find_uniform(self) -> set[str]:
        """Registers set once from values that are the same in all threads of the grid: kept as one element."""
        uniform: set[str] = set()
        single = {n for n, writers in self.writers.items() if len(writers) == 1 and not writers[0].guard}
        for instruction in self.body:  # definitions come before uses, so one pass finds nearly all
            results = self._results(instruction)
            if not results or any(name not in single for name in results):
                continue
            if instruction.base == "ld" and "param" in instruction.mods:
                base = instruction.operands[1].base  # type: ignore[union-attr]
                if isinstance(base, Sym) and base.name in self.params:
                    uniform.update(results)
            elif id(instruction) in self.alus:
                sources = [o for o, _ in self.alus[id(instruction)].sources]
                if all(self._is_uniform(o, uniform) for o in sources):
                    uniform.update(results)
        return uniform

    def _is_uniform(self, operand: Operand, uniform: set[str]) -> bool:
        if isinstance(operand, Reg):
            return operand.name in uniform
        if isinstance(operand, Special):
            return operand.name in UNIFORM_SPECIALS
        return isinstance(operand, Imm | Sym)

    # blocks

    def _cut_blocks(self) -> list[Block]:
        leaders = {0, *self.labels.values()}
        for k, instruction in enumerate(self.body):
            if instruction.base in CONTROL and not is_warp_barrier(instruction):
                leaders.add(k + 1)
        starts = sorted(k for k in leaders if k < len(self.body))
        number = {start: i for i, start in enumerate(starts)}
        number[len(self.body)] = len(starts)  # falling off the end
        blocks = []
        for start, stop in zip(starts, [*starts[1:], len(self.body)], strict=True):
            last = self.body[stop - 1]
            ends = last.base in CONTROL and not is_warp_barrier(last)
            block = Block(start, stop - 1 if ends else stop, last if ends else None)
            if ends and last.base in ("bra", "brx"):
                block.targets = [number[self.labels[name]] for name in self._target_names(last)]
            blocks.append(block)
        return blocks

    def _target_names(self, branch: Instruction) -> list[str]:
        target = branch.operands[-1]
        if branch.base == "bra":
            if not isinstance(target, Label):
                raise unsupported(branch, "target")
            return [target.name]
        assert isinstance(target, Sym | Label)
        return self.tables[target.name]
