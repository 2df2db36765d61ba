"""The parser: scopes, operands, and messages with lines."""

import pytest
from helpers.ptx_kernels import kernel, run

from jax_fa.emulator.faults import PtxSyntaxError, UnknownInstructionError
from jax_fa.emulator.ptx import (
    Address,
    Both,
    Immediate,
    Label,
    Negated,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
    parse,
)


def body(text):
    return parse(kernel(text, shared=64)).kernel("test").instructions


def operands(text):
    """Operands of the first instruction of `text`."""
    prologue = len(body(""))
    return body(text)[prologue - 1].operands


def test_operand_forms():
    assert operands("mov.u32 %r1, %ctaid.x;")[1] == Special("ctaid.x")
    assert operands("mov.b32 %r1, -7;")[1] == Immediate(-7)
    assert operands("mov.b32 %r1, 0fBF800000;")[1] == Immediate(0xBF800000, is_float=True)
    assert operands("mov.b32 %r1, smem;")[1] == Symbol("smem")
    assert isinstance(operands("selp.b32 %r1, 1, 2, !%p1;")[3], Negated)
    assert isinstance(operands("elect.sync _|%p1, -1;")[0], Both)
    assert operands("elect.sync _|%p1, -1;")[0].first == Sink()
    vector = operands("mov.b64 {%r1, _}, %d1;")[0]
    assert isinstance(vector, Vector) and vector.items[1] == Sink()


def test_addresses():
    address = operands("ld.shared.b32 %r1, [%r2+-8];")[1]
    assert isinstance(address, Address) and address.offset == -8
    assert isinstance(address.base, Register)
    assert operands("ld.shared.b32 %r1, [smem + 0x10];")[1] == Address(Symbol("smem"), 16)
    tensor = operands(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d1, {%r1, %r2}], [%r3];"
    )[0]
    assert len(tensor.rest[0].items) == 2


def test_scopes_may_repeat_names():
    twice = """{ .reg .pred P; setp.eq.s32 P, %tid, 0; @P bra DONE; mov.b32 %r1, 1; DONE: }
               { .reg .pred P; setp.eq.s32 P, %tid, 1; @P bra DONE; mov.b32 %r1, 2; DONE: }"""
    instructions = body(twice)
    first, second = (i for i in instructions if i.opcode.startswith("setp"))
    assert first.operands[0] != second.operands[0]
    targets = [i.operands[0] for i in instructions if i.opcode == "bra"]
    assert len(set(targets)) == 2 and all(isinstance(t, Label) for t in targets)


def test_comments_keep_the_line_numbers():
    text = kernel("/* two\n lines */ // more\n add.s32 %r1, %r2, %r3;")
    instruction = next(i for i in parse(text).kernel(None).instructions if "add" in i.opcode)
    assert text.split("\n")[instruction.line - 1].strip().startswith("add.s32")


@pytest.mark.parametrize(
    "text, message",
    [
        ("bra NOWHERE;", "label NOWHERE is not defined"),
        ("add.s32 %r1, %r2, %q9;", "%q9"),
        (".reg .b77 %z;", "b77"),
    ],
)
def test_syntax_errors_name_the_line(text, message):
    with pytest.raises(PtxSyntaxError, match=message) as caught:
        body("\n\n" + text)
    assert "PTX line" in str(caught.value)


def test_unknown_instructions_are_refused_by_name_and_line():
    with pytest.raises(UnknownInstructionError, match=r"frobnicate.b32 at line \d+"):
        run("frobnicate.b32 %r1, %r2;")
    with pytest.raises(UnknownInstructionError, match="add.sideways.s32.*similar ones"):
        run("add.sideways.s32 %r1, %r2, %r3;")
    with pytest.raises(UnknownInstructionError, match=r"modifier .L9::maybe"):
        run("ld.global.L9::maybe.b32 %r1, [%d1];")


def test_a_missing_kernel_is_named():
    with pytest.raises(PtxSyntaxError, match="no kernel 'other'.*test"):
        parse(kernel("")).kernel("other")
