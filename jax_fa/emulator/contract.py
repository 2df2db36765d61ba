"""Products and sums that the assembler makes one instruction of.

``mul.f32`` and ``add.f32`` without a rounding modifier may be contracted to an fma, which rounds
once (PTX ISA, add). ptxas does so wherever the product has no other use, and results differ in
their last bits: what runs on a GPU is the contracted program. With ``.rn`` nothing is contracted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from jax_fa.emulator import flow
from jax_fa.emulator.ptx import Immediate, Instruction, Kernel, Register

_PRODUCTS = {"mul.f32": "", "mul.ftz.f32": ".ftz"}
# What the sum of a product becomes, by the place of the product in it.
_SUMS = {
    f"{name}{ftz}.f32": (ftz, fused)
    for ftz in ("", ".ftz")
    for name, fused in (
        ("add", ("fma.rn", "fma.rn")),
        ("sub", ("fms.rn", "fnma.rn")),
    )
}


def contracted(kernel: Kernel) -> Kernel:
    """The kernel with sums of products replaced; other instructions keep their places."""
    instructions = list(kernel.instructions)
    uses = _uses(instructions)
    borders = {i + 1 for i, x in enumerate(instructions) if flow.is_branch(x) or flow.is_exit(x)}
    borders |= {flow.branch_target(x) for x in instructions if flow.is_branch(x)}
    products: dict[int, Instruction] = {}
    products_of: dict[int, list[int]] = {}  # by factor
    for index, instruction in enumerate(instructions):
        if index in borders:
            products.clear()
            products_of.clear()
        fused = _fused(instruction, products)
        if fused is not None:
            instructions[index] = fused
        if products:
            # A product whose factor may have changed is one no longer.
            for written in _registers(instruction.operands[:1]):
                for number in products_of.pop(written, ()):
                    products.pop(number, None)
        if instruction.opcode in _PRODUCTS and instruction.guard is None:
            number = instruction.operands[0].number
            # Once written and once read: in the sum.
            if uses[number] == 2:
                products[number] = instruction
                for factor in _registers(instruction.operands[1:]):
                    products_of.setdefault(factor, []).append(number)
    return replace(kernel, instructions=instructions)


def _uses(instructions: list[Instruction]) -> Counter[int]:
    """The number of times that each result of a product is named."""
    uses = Counter(
        dict.fromkeys((x.operands[0].number for x in instructions if x.opcode in _PRODUCTS), 0)
    )
    for instruction in instructions:
        for operand in instruction.operands:
            if operand.__class__ is Register:
                if operand.number in uses:
                    uses[operand.number] += 1
            elif operand.__class__ is not Immediate:
                for number in _registers(operand):
                    if number in uses:
                        uses[number] += 1
        if instruction.guard is not None and instruction.guard.register.number in uses:
            uses[instruction.guard.register.number] += 1
    return uses


def _fused(instruction: Instruction, products: dict[int, Instruction]) -> Instruction | None:
    """The fma of a sum one of whose terms is a product; the first of two."""
    if instruction.opcode not in _SUMS or instruction.guard is not None:
        return None
    ftz, names = _SUMS[instruction.opcode]
    result, *terms = instruction.operands
    for place, term in enumerate(terms):
        product = products.get(term.number) if isinstance(term, Register) else None
        if product is not None and _PRODUCTS[product.opcode] == ftz:
            operands = (result, *product.operands[1:], terms[1 - place])
            return Instruction(f"{names[place]}{ftz}.f32", operands, None, instruction.line)
    return None


def _registers(part: object) -> Iterator[int]:
    """Numbers of the registers that an operand, or a tuple of operands, names."""
    if isinstance(part, Register):
        yield part.number
    elif isinstance(part, tuple):
        for inner in part:
            yield from _registers(inner)
