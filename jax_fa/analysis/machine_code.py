"""Reads machine code: what instructions a kernel has, and which of them its inner loops repeat.

``nvdisasm`` turns a device image into text; here that becomes instructions, their control flow
graph and its natural loops (an edge back to a block that dominates its origin, and all that
reaches the origin without passing that block). Waits branch out of a loop into code at the end of
the kernel, spin there and return: by distance alone, every one of them looks like a loop around
the rest of the kernel; by dominance none does.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jax_fa.aot import cubins

NVDISASM_REQUIREMENT = "nvidia-cuda-nvdisasm"

MEANINGS = {
    "tcgen05.mma": r"UTC\w*MMA",
    "tcgen05.ld": r"LDTM",
    "tcgen05.st": r"STTM",
    "tcgen05.cp": r"UTCCP",
    "tcgen05.commit": r"UTCBAR",
    "tcgen05.alloc": r"UTCATOMSWS",
    "wgmma": r"[HIQB]GMMA",
    "mma.sync": r"[HIDQO]MMA",
    "tma load": r"UTMALDG",
    "tma store": r"UTMASTG",
    "tma reduce": r"UTMAREDG",
    "bulk copy": r"UBLKCP",
    "bulk reduce": r"UBLKRED",
    "cp.async": r"LDGSTS",
    "ldmatrix": r"LDSM",
    "stmatrix": r"STSM",
    "ld.shared": r"LDS",
    "st.shared": r"STS",
    "ld.global": r"LDG",
    "st.global": r"STG",
    "red.global": r"REDG|ATOMG",
    "red.global.v4": r"REDG\.E\.ADD\.F32x4",
    "local memory": r"LDL|STL",
    "exp2": r"MUFU\.EX2",
    "other special": r"MUFU",
    "two floors": r"FADD2\.RM",
    "floor": r"FADD\.RM",
    "packed f32": r"F(FMA|ADD|MUL)2",
    "scalar f32": r"F(FMA|ADD|MUL)",
    "max": r"FMNMX3?",
    "convert": r"F2FP",
    "select": r"F?SEL",
    "to uniform": r"R2UR",
    "shuffle": r"SHFL",
    "mbarrier": r"SYNCS",
    "named barrier": r"BAR",
    "setmaxnreg": r"USETMAXREG",
}
"""The purpose of an instruction, by a regular expression over its opcode and modifiers.

An addition rounded down is how ``sm100/row_softmax.py`` takes the floor of an exponent, which
only exponentials by polynomial need. Many moves to uniform registers say that ptxas has too few of
these and describes what products read per thread (``sm90/bwd_bias.py``).
"""

NARROWER = {"other special": "exp2", "red.global": "red.global.v4"}
"""Meanings whose count leaves out those instructions that also have the second meaning."""

_PATTERNS = {name: re.compile(rf"({pattern})(\.|$)") for name, pattern in MEANINGS.items()}

_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<predicate>!?U?P\w+)\s+)?"
    r"(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*);"
)
_LABEL = re.compile(r"^(\.L_x_\d+):")
_FUNCTION = re.compile(r"^\.text\.(\w+):")
_TARGET = re.compile(r"\.L_x_\d+")
_JUMPS = re.compile(r"BRXU?\b|BRA\b")
_LEAVES = re.compile(r"(EXIT|RET)\b")


class Instruction(NamedTuple):
    """One machine instruction.

    Attributes:
        opcode: with modifiers.
        operands: as printed.
        predicate: that it is executed under; "" for always.
    """

    opcode: str
    operands: str = ""
    predicate: str = ""


@dataclass(frozen=True)
class Code:
    """Machine code of one kernel.

    Attributes:
        name: its symbol.
        instructions: in order.
        labels: name -> index of the instruction behind it.
    """

    name: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]


def find_nvdisasm() -> Path | None:
    """NVIDIA's disassembler: on the PATH, or in the wheel of that name."""
    on_path = shutil.which("nvdisasm")
    if on_path:
        return Path(on_path)
    try:
        files = importlib.metadata.files(NVDISASM_REQUIREMENT) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == "nvdisasm"), None)


def disassemble(path: Path, nvdisasm: Path) -> tuple[Code, ...]:
    """The kernels in the object (or cubin) at ``path``."""
    found: list[Code] = []
    for image in cubins.cubins(path):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(image)
            cubin.flush()
            done = subprocess.run(
                [nvdisasm, "-c", cubin.name], capture_output=True, text=True, check=True
            )
        found += parse(done.stdout)
    return tuple(found)


def parse(listing: str) -> list[Code]:
    """The kernels in what nvdisasm printed."""
    found: list[Code] = []
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    name = ""
    for line in listing.splitlines():
        if function := _FUNCTION.match(line):
            if instructions:
                found.append(Code(name, tuple(instructions), labels))
            name, instructions, labels = function[1], [], {}
        elif label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif match := _INSTRUCTION.match(line):
            instructions.append(
                Instruction(match["opcode"], match["operands"].strip(), match["predicate"] or "")
            )
    if instructions:
        found.append(Code(name, tuple(instructions), labels))
    return found


@functools.cache
def _meanings_of(opcode: str) -> tuple[str, ...]:
    """Those of ``MEANINGS`` that an opcode counts for."""
    found = [name for name, pattern in _PATTERNS.items() if pattern.match(opcode)]
    return tuple(name for name in found if NARROWER.get(name) not in found)


def count(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Number of instructions of each of ``MEANINGS``, and of "all"."""
    opcodes = Counter(instruction.opcode for instruction in instructions)
    counts = dict.fromkeys(MEANINGS, 0)
    for opcode, number in opcodes.items():
        for meaning in _meanings_of(opcode):
            counts[meaning] += number
    return {**counts, "all": opcodes.total()}


@dataclass(frozen=True)
class Loop:
    """A natural loop.

    Attributes:
        body: indices of its instructions, those of inner loops included.
        own: indices of those that are in no inner loop.
        every_time: indices of those that every iteration executes once: the others are inner
            loops, or lie behind a branch.
        paths: for each of its branches, indices of those that an iteration executes which takes it
            and, within it, no further one.
    """

    body: frozenset[int]
    own: frozenset[int]
    every_time: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]


class _Block(NamedTuple):
    start: int
    end: int
    successors: tuple[int, ...]


def _blocks(code: Code) -> list[_Block]:
    """Basic blocks in order; successors are positions in the list."""
    size = len(code.instructions)
    targets: dict[int, list[int]] = {}
    starts = {0, *code.labels.values()}
    for at, instruction in enumerate(code.instructions):
        if _JUMPS.match(instruction.opcode):
            # A jump by a register lists its targets in a comment.
            names = _TARGET.findall(instruction.operands)
            targets[at] = [code.labels[name] for name in names]
        if at in targets or _LEAVES.match(instruction.opcode):
            starts.add(at + 1)
    ordered = sorted(start for start in starts if start < size)
    position = {start: number for number, start in enumerate(ordered)}
    blocks = []
    for number, start in enumerate(ordered):
        end = ordered[number + 1] if number + 1 < len(ordered) else size
        following = [position[target] for target in targets.get(end - 1, ()) if target < size]
        if end < size and not _ends(code.instructions[end - 1]):
            following.append(position[end])
        blocks.append(_Block(start, end, tuple(following)))
    return blocks


def _ends(last: Instruction) -> bool:
    """True if execution never falls through ``last``."""
    if last.predicate:
        return False
    if last.opcode.startswith("BRA"):
        # A uniform predicate is the first operand, not a prefix: BRA.U UP0, `(...).
        return last.operands.startswith("`")
    return bool(_JUMPS.match(last.opcode) or _LEAVES.match(last.opcode))


def _dominators(blocks: Sequence[_Block]) -> list[int]:
    """Immediate dominator of each block, -1 of unreachable ones (Cooper, Harvey and Kennedy)."""
    order: list[int] = []
    seen = {0}
    stack = [(0, iter(blocks[0].successors))]
    while stack:
        block, following = stack[-1]
        child = next((c for c in following if c not in seen), None)
        if child is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(child)
            stack.append((child, iter(blocks[child].successors)))
    rank = {block: number for number, block in enumerate(order)}
    before: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for successor in blocks[block].successors:
            before[successor].append(block)
    parent = [-1] * len(blocks)
    parent[0] = 0
    changed = True
    while changed:
        changed = False
        for block in reversed(order[:-1]):
            known = [p for p in before[block] if parent[p] >= 0]
            new = known[0]
            for other in known[1:]:
                while new != other:
                    while rank[new] < rank[other]:
                        new = parent[new]
                    while rank[other] < rank[new]:
                        other = parent[other]
            changed |= parent[block] != new
            parent[block] = new
    return parent


def loops(code: Code) -> list[Loop]:
    """The natural loops of a kernel, those with the same head as one."""
    blocks = _blocks(code)
    parent = _dominators(blocks)

    def dominators_of(block: int) -> set[int]:
        found = {block}
        while block != parent[block]:
            block = parent[block]
            found.add(block)
        return found

    before: dict[int, list[int]] = {}
    tails: dict[int, list[int]] = {}
    for number, block in enumerate(blocks):
        if parent[number] < 0:
            continue
        for successor in block.successors:
            before.setdefault(successor, []).append(number)
            if successor in dominators_of(number):
                tails.setdefault(successor, []).append(number)
    bodies = {}
    for head, origins in tails.items():
        body, pending = {head}, list(origins)
        while pending:
            block = pending.pop()
            if block not in body:
                body.add(block)
                pending += before.get(block, [])
        bodies[head] = body
    found = []
    for head, body in bodies.items():
        inner = {
            block
            for other, blocks_of_other in bodies.items()
            if other != head and blocks_of_other < body
            for block in blocks_of_other
        }
        own = body - inner
        always = set.intersection(own, *(dominators_of(tail) for tail in tails[head]))
        paths = {frozenset(always | (own & dominators_of(block))) for block in own - always}
        found.append(
            Loop(
                _indices(blocks, body),
                _indices(blocks, own),
                tuple(sorted(_indices(blocks, always))),
                tuple(sorted(tuple(sorted(_indices(blocks, path))) for path in paths)),
            )
        )
    return found


def _indices(blocks: Sequence[_Block], numbers: Iterable[int]) -> frozenset[int]:
    return frozenset(at for n in numbers for at in range(blocks[n].start, blocks[n].end))


class MainLoop(NamedTuple):
    """Instructions of the softmax of one block of scores: one iteration of the loop around it.

    Attributes:
        counts: by meaning, of instructions that every iteration executes.
        scores: of a thread in an iteration.
    """

    counts: dict[str, int]
    scores: int

    @property
    def polynomials(self) -> float:
        """Share of the exponentials that no special function unit takes."""
        return (2 * self.counts["two floors"] + self.counts["floor"]) / self.scores

    def per_tile(self, meaning: str, tile_scores: int) -> float:
        """Warp instructions of a meaning for so many scores."""
        return self.counts[meaning] * tile_scores / (self.scores * 32)


MIN_SCORES = 16
"""Of a thread and block, in any of our kernels; less is some epilogue."""


def _main_loops(code: Code, paths: Iterable[Iterable[int]], rounded: int) -> list[MainLoop]:
    """Those of ``paths``, the instructions of an iteration each, that are of a softmax."""
    found = []
    for path in paths:
        counts = count(code.instructions[at] for at in path)
        scores = 2 * counts["convert"] // rounded
        if min(counts["exp2"], scores) >= MIN_SCORES:
            found.append(MainLoop(counts, scores))
    return found


def softmax_loops(code: Code, rounded: int) -> list[MainLoop]:
    """The loops that turn scores into probabilities, those that select least, hence mask, first.

    They are found by content: innermost among the loops in which exponentials are taken and values
    rounded in pairs, ``rounded`` values for each score (P, and in a backward dS). Masks and rare
    paths make for several. Of a loop that does not do it in every iteration, its paths count.
    """
    candidates = []
    for loop in loops(code):
        always = _main_loops(code, [loop.every_time], rounded)
        mains = always or _main_loops(code, loop.paths, rounded)
        candidates += [(loop.body, main) for main in mains]
    found = [main for body, main in candidates if not any(other < body for other, _ in candidates)]
    return sorted(found, key=lambda main: (main.counts["select"], main.counts["all"]))


def instructions_per(code: Code, meaning: str) -> tuple[float, ...]:
    """Of each innermost loop around instructions of a meaning: its instructions for one of them.

    One warp issues these one after another, so they bound how fast it can start such work.
    """
    candidates = []
    for loop in loops(code):
        counts = count(code.instructions[at] for at in loop.own)
        if counts[meaning]:
            candidates.append((loop.body, counts["all"] / counts[meaning]))
    return tuple(
        each for body, each in candidates if not any(other < body for other, _ in candidates)
    )
