"""PTX text -> kernels: instructions with resolved registers and labels.

The grammar is the part of PTX that compilers emit for kernels: declarations, scopes in braces
(inline assembly repeats register and label names in them), labels and instructions. Functions
other than entries are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from jax_fa.emulator.faults import Place, PtxSyntaxError

TYPE_BYTES = {"pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2,
              "bf16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8,
              "u64": 8, "s64": 8, "f64": 8, "f32x2": 8, "b128": 16}  # fmt: skip


class Register(NamedTuple):
    """A declared register: its number in the kernel (unique across scopes)."""

    number: int


class Special(NamedTuple):
    """A special register such as %tid.x."""

    name: str


class Immediate(NamedTuple):
    """A literal. Floating literals keep their bits; `is_float` tells which kind it was."""

    bits: int
    is_float: bool = False


class Symbol(NamedTuple):
    """The address of a variable or parameter."""

    name: str


class Vector(NamedTuple):
    """{a, b, ...}."""

    items: tuple


class Address(NamedTuple):
    """[base + offset], with tensor coordinates or further parts in `rest`."""

    base: Register | Symbol | Immediate
    offset: int
    rest: tuple = ()


class Both(NamedTuple):
    """first|second, two destinations."""

    first: Operand
    second: Operand


class Negated(NamedTuple):
    """!register."""

    register: Register


class Label(NamedTuple):
    """A branch target as an instruction index."""

    target: int


class Sink(NamedTuple):
    """The operand `_`: a result nobody wants."""


Operand = Register | Special | Immediate | Symbol | Vector | Address | Both | Negated | Label | Sink


class Guard(NamedTuple):
    """@p or @!p."""

    register: Register
    negated: bool


@dataclass(slots=True)
class Instruction:
    """One instruction: full dotted opcode, operands as written, guard, line in the text."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Guard | None
    line: int

    def __str__(self) -> str:
        return f"{self.opcode} (line {self.line})"


class Variable(NamedTuple):
    """A .shared, .local, .global or .param variable."""

    name: str
    space: str
    size: int
    align: int


@dataclass
class Kernel:
    """One .entry."""

    name: str
    params: list[Variable]
    instructions: list[Instruction] = field(default_factory=list)
    register_types: list[str] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass
class Module:
    """A PTX file."""

    target: str
    kernels: dict[str, Kernel]

    def kernel(self, name: str | None) -> Kernel:
        """The named kernel; with None the only one."""
        if name is None and len(self.kernels) == 1:
            return next(iter(self.kernels.values()))
        if name not in self.kernels:
            raise PtxSyntaxError(f"no kernel {name!r}; the PTX has {sorted(self.kernels)}")
        return self.kernels[name]


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?([^{]*)\{")
_VARIABLE = re.compile(
    r"\.(?:(?:extern|visible|weak|common)\s+\.)?(param|shared|local|global|const)\s+"
    r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s*(?:\.\w+\s+)?(?:\.align\s+\d+)?\s*)?"
    r"([\w$]+)\s*((?:\[\s*\d*\s*\])*)"
)
_TOKEN = re.compile(r"\s*(?:(?P<brace>[{}])|(?P<label>[\w$]+)\s*:(?!:)|(?P<statement>[^;]+);)")
_OPCODE = re.compile(r"(?:@(!?)([\w$%]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_DECIMAL = re.compile(r"-?\d+[uU]?$")
_SPECIALS = frozenset(
    "tid ntid ctaid nctaid laneid warpid nwarpid smid nsmid gridid clusterid nclusterid "
    "cluster_ctaid cluster_nctaid cluster_ctarank cluster_nctarank is_explicit_cluster clock "
    "clock_hi clock64 globaltimer globaltimer_lo globaltimer_hi lanemask_eq lanemask_le "
    "lanemask_lt lanemask_ge lanemask_gt dynamic_smem_size total_smem_size".split()
)


def parse(text: str) -> Module:
    """Parses a PTX file.

    Args:
      text: PTX source as nvcc, the CuTe DSL or a person writes it.

    Returns:
      The module with all its entries.

    Raises:
      PtxSyntaxError: names the line.
    """
    clean = _strip_comments(text)
    target = re.search(r"\.target\s+([\w, ]+)", clean)
    kernels = {}
    position = 0
    shared_outside: list[Variable] = []
    while match := _ENTRY.search(clean, position):
        shared_outside += _variables(clean[position : match.start()])
        body_end = _closing_brace(clean, match.end())
        name, params, directives = match.groups()
        kernel = Kernel(name, _variables(params or ""), variables=list(shared_outside))
        for directive, values in re.findall(r"\.(\w+)\s*([\d, ]*)", directives):
            kernel.directives[directive] = tuple(int(v) for v in re.findall(r"\d+", values))
        _Body(kernel, clean, match.end(), body_end).parse()
        kernels[name] = kernel
        position = body_end + 1
    if re.search(r"\.func\b", clean):
        raise PtxSyntaxError("device functions (.func) are not supported; inline them")
    if not kernels:
        raise PtxSyntaxError("the text has no .entry")
    return Module(target.group(1).strip() if target else "", kernels)


def _strip_comments(text: str) -> str:
    """Blanks comments, keeping every newline so that lines still count."""
    text = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def _closing_brace(text: str, position: int) -> int:
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, position):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return match.start()
    raise PtxSyntaxError("a kernel body has no closing brace")


def _variables(text: str) -> list[Variable]:
    found = []
    for space, align, type_, name, dims in _VARIABLE.findall(text):
        size = TYPE_BYTES[type_]
        for extent in re.findall(r"\[\s*(\d*)\s*\]", dims):
            size *= int(extent or 0)
        found.append(Variable(name, space, size, int(align or TYPE_BYTES[type_])))
    return found


class _Scope:
    """Names declared between two braces."""

    def __init__(self, parent: _Scope | None) -> None:
        self.parent = parent
        self.registers: dict[str, Register] = {}
        self.ranges: dict[str, tuple[str, int]] = {}
        self.labels: dict[str, int] = {}

    def chain(self) -> list[_Scope]:
        """The scope and those around it, innermost first."""
        scope: _Scope | None = self
        found = []
        while scope is not None:
            found.append(scope)
            scope = scope.parent
        return found


class _Body:
    """Parser of one kernel body."""

    def __init__(self, kernel: Kernel, text: str, start: int, end: int) -> None:
        self.kernel = kernel
        self.text = text
        self.start, self.end = start, start + len(text[start:end].rstrip())
        self.scope = _Scope(None)
        self.line = text.count("\n", 0, start) + 1
        self.pending_labels: list[tuple[int, int, str, _Scope]] = []
        self.symbols = {v.name for v in kernel.params + kernel.variables}

    def error(self, message: str) -> PtxSyntaxError:
        return PtxSyntaxError(message, Place(self.kernel.name, 0, 0, self.line))

    def parse(self) -> None:
        position, text = self.start, self.text
        while position < self.end:
            match = _TOKEN.match(text, position, self.end)
            if match is None:
                raise self.error(f"cannot read {text[position : position + 60].strip()!r}")
            first = match.start(match.lastgroup)
            self.line += text.count("\n", position, first)
            if match.lastgroup == "brace":
                self.brace(match.group("brace"))
            elif match.lastgroup == "label":
                self.scope.labels[match.group("label")] = len(self.kernel.instructions)
            else:
                self.statement(match.group("statement"))
            self.line += text.count("\n", first, match.end())
            position = match.end()
        self.resolve_labels()

    def brace(self, brace: str) -> None:
        if brace == "{":
            self.scope = _Scope(self.scope)
        elif self.scope.parent is None:
            raise self.error("unbalanced closing brace")
        else:
            self.scope = self.scope.parent

    def statement(self, text: str) -> None:
        if text.startswith(".reg"):
            self.declare_registers(text)
        elif text.startswith((".shared", ".local", ".extern")):
            found = _variables(text)
            self.kernel.variables += found
            self.symbols |= {v.name for v in found}
        elif text.startswith((".pragma", ".loc", ".file")):
            return
        elif text.startswith("."):
            raise self.error(f"directive {text.split()[0]} is not supported")
        else:
            self.instruction(text)

    def declare_registers(self, text: str) -> None:
        type_, names = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S).groups()
        if type_ not in TYPE_BYTES:
            raise self.error(f"register type .{type_} is not supported")
        for name in names.split(","):
            name = name.strip()
            if ranged := re.match(r"(.+)<(\d+)>$", name):
                self.scope.ranges[ranged.group(1)] = (type_, int(ranged.group(2)))
            else:
                self.scope.registers[name] = self.new_register(type_)

    def new_register(self, type_: str) -> Register:
        self.kernel.register_types.append(type_)
        return Register(len(self.kernel.register_types) - 1)

    def lookup(self, name: str) -> Register | None:
        scope: _Scope | None = self.scope
        while scope is not None:
            known = scope.registers.get(name)
            if known is not None:
                return known
            if scope.ranges:
                prefix = name.rstrip("0123456789")
                if prefix in scope.ranges and prefix != name:
                    register = self.new_register(scope.ranges[prefix][0])
                    scope.registers[name] = register
                    return register
            scope = scope.parent
        return None

    def instruction(self, text: str) -> None:
        match = _OPCODE.match(text)
        if match is None:
            raise self.error(f"cannot read the instruction {text!r}")
        negated, guard_name, opcode, rest = match.groups()
        guard = None
        if guard_name:
            register = self.lookup(guard_name)
            if register is None:
                raise self.error(f"guard {guard_name} is not declared")
            guard = Guard(register, negated == "!")
        if opcode == "bra" or opcode.startswith("bra."):
            operands: tuple = (Label(-1),)
            self.pending_labels.append(
                (len(self.kernel.instructions), self.line, rest.strip(), self.scope)
            )
        else:
            operands = tuple(self.operand(part) for part in _split(rest))
        self.kernel.instructions.append(Instruction(opcode, operands, guard, self.line))

    def operand(self, text: str) -> Operand:
        text = text.strip()
        first = text[:1]
        if first == "{":
            return Vector(tuple(self.operand(part) for part in _split(text[1:-1])))
        if first == "[":
            return self.address(text[1:-1])
        if first.isdigit():
            return self.literal(text)
        register = self.lookup(text)
        if register is not None:
            return register
        if text == "_":
            return Sink()
        if first == "!":
            return Negated(self.operand(text[1:]))
        if "|" in text:
            return Both(*(self.operand(part) for part in text.split("|")))
        return self.literal(text)

    def literal(self, text: str) -> Operand:
        if _DECIMAL.match(text):
            return Immediate(int(text.rstrip("uU")))
        if re.match(r"-?0[xX][0-9a-fA-F]+[uU]?$", text):
            return Immediate(int(text.rstrip("uU"), 16))
        if re.match(r"0[fF][0-9a-fA-F]{8}$", text) or re.match(r"0[dD][0-9a-fA-F]{16}$", text):
            return Immediate(int(text[2:], 16), is_float=True)
        if text in ("true", "false"):
            return Immediate(int(text == "true"))
        if text in self.symbols:
            return Symbol(text)
        if text.startswith("%") and text[1:].split(".")[0] in _SPECIALS:
            return Special(text[1:])
        raise self.error(f"operand {text!r} is neither declared nor a literal")

    def address(self, text: str) -> Address:
        parts = _split(text)
        match = re.match(r"(.+?)\s*([+-]\s*-?\w+)?$", parts[0].strip())
        base_text, offset_text = match.groups()
        base = self.operand(base_text)
        offset = 0
        if offset_text:
            sign = -1 if offset_text[0] == "-" else 1
            offset = sign * int(offset_text[1:].strip(), 0)
        return Address(base, offset, tuple(self.operand(part) for part in parts[1:]))

    def resolve_labels(self) -> None:
        for index, line, name, scope in self.pending_labels:
            for level in scope.chain():
                if name in level.labels:
                    self.kernel.instructions[index].operands = (Label(level.labels[name]),)
                    break
            else:
                self.line = line
                raise self.error(f"label {name} is not defined")


def _split(text: str) -> list[str]:
    """Splits at top-level commas."""
    if "{" not in text and "[" not in text:
        return text.split(",") if text.strip() else []
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        if char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return parts + [text[start:]] if text.strip() else []
