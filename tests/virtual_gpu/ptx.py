"""What PTX is made of: instructions, operands, variables, functions.

Registers declared in an inner scope (inline assembly) get the scope's number appended, so that names are unique in a
function. Operands are small frozen values; an instruction keeps its line, and the source line of the last `.loc`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reg:
    name: str
    negated: bool = False  # `!%p1`


@dataclass(frozen=True)
class Imm:
    value: int  # integer value, or the bits of a float literal
    is_float: int = 0  # 0, or 32 / 64 for 0f... and 0d... literals


@dataclass(frozen=True)
class Special:
    name: str  # "%tid.x"


@dataclass(frozen=True)
class Sym:
    name: str
    offset: int = 0


@dataclass(frozen=True)
class Mem:
    base: Operand
    offset: int = 0


@dataclass(frozen=True)
class Vec:
    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    first: Operand
    second: Operand


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Sink:
    """`_`: a result nobody wants."""


Operand = Reg | Imm | Special | Sym | Mem | Vec | Pair | Label | Sink


@dataclass
class Instruction:
    base: str  # "ld"
    mods: tuple[str, ...]  # ("global", "v4", "f32")
    operands: tuple[Operand, ...]
    guard: Reg | None
    line: int
    text: str
    source: str = ""

    @property
    def opcode(self) -> str:
        return ".".join((self.base, *self.mods))


@dataclass(frozen=True)
class Variable:
    name: str
    space: str  # "global", "const", "shared", "local", "param"
    size: int  # bytes; 0 for extern arrays
    align: int
    data: bytes | None = None


@dataclass
class Function:
    name: str
    is_entry: bool
    params: list[Variable] = field(default_factory=list)
    results: list[Variable] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)  # name -> type
    variables: dict[str, Variable] = field(default_factory=dict)
    body: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)  # brx.idx target lists
    max_threads: int = 1024


@dataclass
class PtxModule:
    target: str
    functions: dict[str, Function]
    variables: dict[str, Variable]


TYPE_BYTES = {
    **dict.fromkeys(("b8", "u8", "s8"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), 8),
}
