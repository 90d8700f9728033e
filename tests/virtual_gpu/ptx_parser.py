"""PTX text to instructions: parsing only, no meaning."""

from __future__ import annotations

import re
from functools import lru_cache

from virtual_gpu.faults import UnsupportedPtx
from virtual_gpu.ptx import (
    TYPE_BYTES,
    Function,
    Imm,
    Instruction,
    Label,
    Mem,
    Operand,
    Pair,
    PtxModule,
    Reg,
    Sink,
    Special,
    Sym,
    Variable,
    Vec,
)

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_LABEL = re.compile(r"([\w$]+)\s*:(?!:)")
_LINE_DIRECTIVE = re.compile(r"\.(loc|file|version|target|address_size)\b([^\n]*)")
_VARIABLE = re.compile(
    r"(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+(?P<name>[\w$%]+)\s*(?P<dims>(?:\[\s*\d*\s*\])*)\s*(?:=\s*(?P<init>.*))?$",
    re.S,
)
_SPACE = re.compile(r"\.(global|const|shared|local|param)\b")
_NUMBER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$")


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    tail = text[start:].strip()
    return [*parts, tail] if tail else parts


def parse_variable(text: str, space: str) -> Variable:
    match = _VARIABLE.match(text.strip())
    if match is None:
        raise UnsupportedPtx(f"declaration `{text.strip()}`")
    size = TYPE_BYTES[match["type"]]
    dims = [int(d) if d else 0 for d in re.findall(r"\[\s*(\d*)\s*\]", match["dims"])]
    total = size
    for dim in dims:
        total *= dim
    data = _initialiser(match["init"], size, total) if match["init"] else None
    return Variable(match["name"], space, total, int(match["align"] or size), data)


def _initialiser(text: str, size: int, total: int) -> bytes:
    values = [_immediate(t) for t in _split(text.strip().strip("{}"))]
    if any(v is None for v in values):
        raise UnsupportedPtx(f"initialiser `{text[:60]}`: only numbers are supported")
    mask = (1 << (8 * size)) - 1
    data = b"".join((v.value & mask).to_bytes(size, "little") for v in values if v)
    return data.ljust(total, b"\0")


def _immediate(text: str) -> Imm | None:
    if _NUMBER.match(text):
        return Imm(int(text.rstrip("U"), 0) if not re.match(r"-?0\d", text.rstrip("U")) else int(text.rstrip("U"), 8))
    if match := re.match(r"0([fFdD])([0-9a-fA-F]+)$", text):
        return Imm(int(match[2], 16), 32 if match[1] in "fF" else 64)
    return None


class Parser:
    """Recursive only in scopes; reads the module once from front to back."""

    def __init__(self, text: str) -> None:
        self.text = _COMMENT.sub(_blank, text.rstrip("\0 \n"))
        self.position = 0
        self.line = 1
        self.files: dict[str, str] = {}
        self.source = ""
        self.target = ""
        self.functions: dict[str, Function] = {}
        self.variables: dict[str, Variable] = {}

    def _advance(self, end: int) -> str:
        chunk = self.text[self.position : end]
        self.line += chunk.count("\n")
        self.position = end
        return chunk

    def _skip_space(self) -> bool:
        """Move to the next statement; False at the end of the text."""
        match = re.compile(r"\s*").match(self.text, self.position)
        self._advance(match.end() if match else self.position)
        return self.position < len(self.text)

    def _line_directive(self) -> bool:
        match = _LINE_DIRECTIVE.match(self.text, self.position)
        if match is None:
            return False
        self._advance(match.end())
        words = match[2].replace(",", " ").split()
        if match[1] == "loc":
            self.source = f"{words[0]}:{words[1]}"  # .file comes last; resolved in parse
        elif match[1] == "file":
            self.files[words[0]] = words[1].strip('"')
        elif match[1] == "target":
            self.target = words[0]
        return True

    def _until(self, stops: str) -> str:
        """Text up to a stop character outside quotes, which is consumed."""
        end = self.position
        while self.text[end] not in stops:
            end = self.text.index('"', end + 1) + 1 if self.text[end] == '"' else end + 1
        chunk = self._advance(end)
        self._advance(end + 1)
        return chunk.strip()

    def parse(self) -> PtxModule:
        while self._skip_space():
            if self._line_directive():
                continue
            if self.text.startswith(".section", self.position):
                self._advance(self.text.index("}", self.position) + 1)
                continue
            head = re.compile(r"[^;{=]*").match(self.text, self.position)
            is_function = head is not None and re.search(r"\.(entry|func)\b", head.group()) is not None
            if is_function:
                self._function()
            else:
                self._module_variable(self._until(";"))
        for function in self.functions.values():
            for instruction in function.body:
                number, _, line = instruction.source.partition(":")
                instruction.source = f"{self.files.get(number, number)}:{line}" if line else ""
        return PtxModule(self.target, self.functions, self.variables)

    def _module_variable(self, text: str) -> None:
        if text.startswith((".pragma", ".alias")) or not text:
            return
        space = _SPACE.search(text)
        if space is None:
            raise UnsupportedPtx(f"directive `{text[:80]}` at PTX line {self.line}")
        variable = parse_variable(text[space.end() :], space[1])
        self.variables[variable.name] = variable

    def _function(self) -> None:
        header = ""
        while True:
            header += self._until(";{")
            if self.text[self.position - 1] == ";":
                return  # a declaration
            break
        match = re.search(r"\.(entry|func)\s*(?:\((.*?)\)\s*)?([\w$]+)\s*(?:\((.*?)\))?", header, re.S)
        assert match is not None
        function = Function(match[3], match[1] == "entry")
        function.results = [parse_variable(_SPACE.sub("", p, count=1), "param") for p in _split(match[2] or "")]
        for text in _split(match[4] or ""):
            text = re.sub(r"\.ptr(\s*\.(global|shared|const|local))?(\s*\.align\s+\d+)?", "", text)
            function.params.append(parse_variable(_SPACE.sub("", text, count=1), "param"))
        if limits := re.search(r"\.(?:max|req)ntid\s+([\d,\s]+)", header):
            function.max_threads = 1
            for dim in limits[1].split(","):
                function.max_threads *= int(dim) if dim.strip() else 1
        self.functions[function.name] = function
        BodyParser(self, function).parse()


class BodyParser:
    """Statements of one function, with its stack of scopes."""

    def __init__(self, outer: Parser, function: Function) -> None:
        self.outer = outer
        self.function = function
        self.scopes: list[tuple[int, dict[str, str]]] = [(0, {})]
        self.num_scopes = 1
        self.pending: list[tuple[Instruction, tuple[int, ...]]] = []

    def parse(self) -> None:
        outer = self.outer
        while outer._skip_space():
            char = outer.text[outer.position]
            if outer._line_directive():
                continue
            if char == "{":
                self.scopes.append((self.num_scopes, {}))
                self.num_scopes += 1
                outer._advance(outer.position + 1)
            elif char == "}":
                outer._advance(outer.position + 1)
                self.scopes.pop()
                if not self.scopes:
                    break
            elif match := _LABEL.match(outer.text, outer.position):
                self._label(match[1])
                outer._advance(match.end())
            else:
                line = outer.line
                self._statement(outer._until(";"), line)
        for instruction, chain in self.pending:
            instruction.operands = tuple(self._finish(o, chain) for o in instruction.operands)

    def _label(self, name: str) -> None:
        self.last_label = name
        scope = self.scopes[-1][0]
        self.function.labels[name if scope == 0 else f"{name}@{scope}"] = len(self.function.body)

    def _statement(self, text: str, line: int) -> None:
        if not text or text.startswith(".pragma"):
            return
        if text.startswith(".reg"):
            self._registers(text)
        elif text.startswith(".branchtargets"):
            self.function.tables[self.last_label] = _split(text.removeprefix(".branchtargets"))
        elif text.startswith("."):
            space = _SPACE.search(text)
            if space is None:
                raise UnsupportedPtx(f"directive `{text}` at PTX line {line}")
            variable = parse_variable(text[space.end() :], space[1])
            self._declare_variable(variable)
        else:
            self._instruction(" ".join(text.split()), line)

    def _declare_variable(self, variable: Variable) -> None:
        scope, names = self.scopes[-1]
        name = variable.name if scope == 0 else f"{variable.name}@{scope}"
        names[variable.name] = name
        self.function.variables[name] = Variable(name, variable.space, variable.size, variable.align, variable.data)

    def _registers(self, text: str) -> None:
        match = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S)
        assert match is not None
        scope, names = self.scopes[-1]
        for name in _split(match[2]):
            family = re.match(r"([\w$%]+)<(\d+)>", name)
            members = [f"{family[1]}{i}" for i in range(int(family[2]))] if family else [name]
            for member in members:
                unique = member if scope == 0 else f"{member}@{scope}"
                names[member] = unique
                self.function.registers[unique] = match[1]

    def _instruction(self, text: str, line: int) -> None:
        original, guard = text, None
        if text.startswith("@"):
            word, text = text[1:].split(None, 1)
            guard = Reg(self._resolve(word.lstrip("!")) or word.lstrip("!"), word.startswith("!"))
        opcode, _, rest = text.partition(" ")
        base, *mods = opcode.replace("::", "_").split(".")
        operands = _split(rest)
        instruction = Instruction(
            base, tuple(mods), tuple(self._operand(o) for o in operands), guard, line, original, self.outer.source
        )
        self.pending.append((instruction, tuple(number for number, _ in self.scopes)))
        self.function.body.append(instruction)

    def _resolve(self, name: str) -> str | None:
        for _, names in reversed(self.scopes):
            if name in names:
                return names[name]
        return None

    def _operand(self, text: str) -> Operand:
        if text == "_":
            return Sink()
        if text[0] in "{(":
            return Vec(tuple(self._operand(t) for t in _split(text[1:-1])))
        if text[0] == "[":
            return self._address(text[1:-1].strip())
        if text[0] == "!":
            inner = self._operand(text[1:].strip())
            assert isinstance(inner, Reg)
            return Reg(inner.name, True)
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first.strip()), self._operand(second.strip()))
        if (immediate := _immediate(text)) is not None:
            return immediate
        if match := re.match(r"(.*?)\s*\+\s*(-?\w+)$", text):
            inner = self._operand(match[1])
            return Sym(inner.name, int(match[2], 0)) if isinstance(inner, Sym) else Mem(inner, int(match[2], 0))
        resolved = self._resolve(text)
        if resolved is None:
            return Special(text) if text.startswith("%") else Sym(text)
        return Reg(resolved) if resolved in self.function.registers else Sym(resolved)

    def _address(self, text: str) -> Mem:
        match = re.match(r"(.*?)\s*\+\s*(-?\w+)$", text)
        if match:
            return Mem(self._operand(match[1]), int(match[2], 0))
        return Mem(self._operand(text))

    def _finish(self, operand: Operand, chain: tuple[int, ...]) -> Operand:
        """Turn a symbol that is a label of an enclosing scope into a Label."""
        if isinstance(operand, Sym):
            for scope in reversed(chain):
                name = operand.name if scope == 0 else f"{operand.name}@{scope}"
                if name in self.function.labels:
                    return Label(name)
        return operand


@lru_cache(maxsize=512)
def parse_ptx(text: str) -> PtxModule:
    """Parse a whole PTX module. Nobody may change the result: who loads the same text again gets the same one."""
    return Parser(text).parse()
