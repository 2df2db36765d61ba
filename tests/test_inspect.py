"""The audit of compiled kernels: machine code, bank conflicts, verdicts, what is printed."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

import jax_fa
from jax_fa.analysis import audit, banks, listing, machine_code, occupancy, ptx_text
from jax_fa.analysis.machine_code import Code, Instruction
from jax_fa.analysis.occupancy import Launch
from jax_fa.aot import cubins
from jax_fa.kernels.edges import SMEM_CAPACITY_BYTES
from jax_fa.spec import ptx_archives
from jax_fa.spec.arch import ARCHS, OPERATIONS
from jax_fa.spec.config_mma_sync import smem_capacity
from jax_fa.spec.config_sm100 import blackwell_forward
from jax_fa.spec.variants import BY_NAME, VARIANTS

# ---------------------------------------------------------------------------------- machine code

LISTING = """
	.target	sm_100
.text.one:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
.L_x_1:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*0020*/              @!P0 BRA `(.L_x_3) ;
.L_x_2:
        /*0030*/                   LDTM.x32 R4, tmem[UR5] ;
        /*0040*/               @P1 BRA `(.L_x_5) ;
        /*0050*/                   MUFU.EX2 R4, R4 ;
.L_x_5:
        /*0060*/                   F2FP.BF16.F32.PACK_AB R5, R6, R4 ;
        /*0070*/                   BRA.U UP0, `(.L_x_1) ;
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*00a0*/              @!P0 BRA `(.L_x_3) ;
        /*00b0*/                   BRA `(.L_x_2) ;
.L_x_4:
        /*00c0*/                   BRA `(.L_x_4) ;
.text.two:
        /*0000*/                   STL [R1], R2 ;
        /*0010*/                   EXIT ;
"""


def test_listing_is_read_kernel_by_kernel():
    one, two = machine_code.parse(LISTING)
    assert (one.name, len(one.instructions)) == ("one", 13)
    assert one.labels[".L_x_3"] == 9
    assert one.instructions[2] == Instruction("BRA", "`(.L_x_3)", "!P0")
    assert [i.opcode for i in two.instructions] == ["STL", "EXIT"]


def test_a_wait_that_spins_out_of_line_makes_no_loop_around_the_kernel():
    outer, spin = sorted(
        machine_code.loops(machine_code.parse(LISTING)[0]), key=lambda x: -len(x.body)
    )
    assert spin.body == {9, 10}
    assert outer.body == set(range(1, 8)) | {9, 10, 11}


def test_what_an_iteration_always_executes_leaves_out_waiting_and_branches():
    outer = max(machine_code.loops(machine_code.parse(LISTING)[0]), key=lambda x: len(x.body))
    assert outer.every_time == (1, 2, 3, 4, 6, 7)


def test_instructions_from_one_product_to_the_next_count_those_of_the_innermost_loop():
    code = machine_code.parse(LISTING)[0]
    # 7 of the loop, and the jump back of its wait; the wait itself is another loop.
    assert machine_code.instructions_per(code, "exp2") == (8.0,)
    assert machine_code.instructions_per(code, "tcgen05.mma") == ()


def test_a_jump_by_a_register_leads_to_all_its_targets():
    """One warp's role behind a jump table would be unreachable without."""
    table = 'R2 -0x10 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*)'
    opcodes = [("BRX", table), ("EXIT", ""), ("NOP", ""), ("BRA", "`(.L_x_1)")]
    code = Code("k", tuple(Instruction(*each) for each in opcodes), {".L_x_0": 1, ".L_x_1": 2})
    assert [sorted(loop.body) for loop in machine_code.loops(code)] == [[2, 3]]


def loops_by_definition(edges, size):
    """Natural loops, dominance being "removing it makes the other unreachable"."""

    def reachable(without=None):
        seen, pending = set(), [0] if without != 0 else []
        while pending:
            block = pending.pop()
            if block not in seen:
                seen.add(block)
                pending += [b for a, b in edges if a == block and b != without]
        return seen

    everything = reachable()
    found: dict[int, set[int]] = {}
    for tail, head in edges:
        if tail in everything and (tail == head or tail not in reachable(without=head)):
            body, pending = {head}, [tail]
            while pending:
                block = pending.pop()
                if block not in body:
                    body.add(block)
                    pending += [a for a, b in edges if b == block and a in everything]
            found.setdefault(head, set()).update(body)
    return {frozenset(body) for body in found.values()}


@pytest.mark.parametrize("seed", range(30))
def test_loops_of_random_programs_are_those_of_the_definition(seed):
    """Each instruction is a block: a branch, a jump, or neither."""
    choose = random.Random(seed)
    size = choose.randint(3, 12)
    instructions, edges = [], []
    for at in range(size):
        kind, target = choose.choice(["plain", "branch", "jump"]), choose.randrange(size)
        if kind != "plain":
            edges.append((at, target))
        if kind != "jump" and at + 1 < size:
            edges.append((at, at + 1))
        operands = "" if kind == "plain" else f"`(.L_x_{target})"
        predicate = "P0" if kind == "branch" else ""
        opcode = "NOP" if kind == "plain" else "BRA"
        instructions.append(Instruction(opcode, operands, predicate))
    labels = {f".L_x_{at}": at for at in range(size)}
    found = machine_code.loops(Code("random", tuple(instructions), labels))
    assert {loop.body for loop in found} == loops_by_definition(edges, size)


@pytest.mark.parametrize(
    "opcode, meaning",
    [
        ("UTCHMMA", "tcgen05.mma"),
        ("UTCQMMA.2CTA", "tcgen05.mma"),
        ("UTCBAR", "tcgen05.commit"),
        ("LDTM.x32", "tcgen05.ld"),
        ("HGMMA.64x128x16.F32.BF16", "wgmma"),
        ("HMMA.16816.F32", "mma.sync"),
        ("UTMALDG.4D", "tma load"),
        ("UTMAREDG.4D", "tma reduce"),
        ("LDGSTS.E.BYPASS.LTC128B.128", "cp.async"),
        ("LDSM.16.M88.4", "ldmatrix"),
        ("REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU", "red.global.v4"),
        ("REDG.E.ADD.S32.STRONG.GPU", "red.global"),
        ("MUFU.RCP", "other special"),
        ("FFMA2", "packed f32"),
        ("FFMA", "scalar f32"),
        ("STL.64", "local memory"),
        ("R2UR.OR", "to uniform"),
        ("BAR.SYNC.DEFER_BLOCKING", "named barrier"),
    ],
)
def test_an_instruction_has_one_meaning(opcode, meaning):
    counts = machine_code.count([Instruction(opcode)])
    assert {name for name, number in counts.items() if number} == {meaning, "all"}


# --------------------------------------------------------------------------------- bank conflicts


@pytest.mark.parametrize(
    "stride, size, expected",
    [(4, 4, 1), (8, 4, 2), (128, 4, 32), (0, 4, 1), (16, 16, 4), (128, 16, 32), (132, 4, 1)],
)
def test_passes_of_strided_lanes(stride, size, expected):
    assert banks.passes([lane * stride for lane in range(32)], size) == expected


@pytest.mark.parametrize("width", [32, 64, 128])
def test_a_swizzle_permutes_the_pieces_of_a_line(width):
    for line in range(0, 2048, 128):
        moved = [banks.swizzled(line + piece, width) for piece in range(0, 128, 16)]
        assert sorted(moved) == list(range(line, line + 128, 16))


@pytest.mark.parametrize("columns", [16, 32, 64, 96, 128, 192, 256])
def test_eight_rows_of_any_column_are_read_in_one_pass(columns):
    tile = banks.Tile(128, columns, columns)
    for row in range(0, 128, 8):
        for column in range(0, columns, 8):
            addresses = [tile.address(row + i, column) for i in range(8)]
            assert banks.passes(addresses, 16) == 1


def test_without_the_swizzle_eight_rows_meet_in_the_same_banks():
    tile = banks.Tile(128, 64, 64, is_swizzled=False)
    assert banks.passes([tile.address(row, 0) for row in range(8)], 16) == 8


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_no_access_of_any_kernel_has_conflicts_and_the_swizzle_is_why(variant):
    found = banks.accesses(variant.key, audit.choose_config(variant))
    assert found and banks.conflicts(found) == []
    assert any(access.passes(swizzle=False) > access.fewest for access in found)


# ------------------------------------------------------------------------------------- verdicts

FORWARD = BY_NAME["fwd_sm100_bf16_d128_full"]
GOOD = ["UTCHMMA", "UTMALDG.4D", "UTMASTG.4D", "LDTM.x32", "STTM.x16"]


def softmax_code(*others, polynomials=6, also=()):
    """A kernel whose loops take the exponentials of 128 scores, the first of them masked.

    The second has the instructions ``also``, too.
    """
    special = 128 - 4 * polynomials
    masked = ["SEL"] * 4 + ["MUFU.EX2"] * 128 + ["F2FP.BF16"] * 64
    plain = ["MUFU.EX2"] * special + ["FADD2.RM"] * (2 * polynomials) + ["F2FP.BF16"] * 64
    plain += also
    instructions = [Instruction(opcode) for opcode in [*GOOD, *others]]
    labels = {}
    for number, body in enumerate((masked, plain + ["NOP"] * 100)):
        labels[f".L_x_{number}"] = len(instructions)
        instructions += [Instruction(opcode) for opcode in body]
        instructions.append(Instruction("BRA", f"`(.L_x_{number})", "P0"))
    return Code("kernel", (*instructions, Instruction("EXIT")), labels)


@pytest.fixture
def kernel(monkeypatch):
    """One kernel of good manners, in place of what an object holds."""
    good = cubins.Kernel("kernel", 128, 0, 1024, 4096, (8,))
    monkeypatch.setattr(cubins, "kernels", lambda path: (good,))
    return good


def audited(code, shared=(1024,), variant=FORWARD):
    report = audit.resources(variant, None, shared)
    audit.audit_code(report, variant, [code])
    return report


def test_a_good_kernel_is_ok_in_plain_words(kernel):
    report = audited(softmax_code())
    assert report.verdict == (
        "tcgen05.mma, TMA both ways, tensor memory read and written, no local memory: ok"
    )
    assert report.softmax.polynomials == 6 / 32
    assert report.softmax.special_cycles == 1024 * 26 / 32
    assert report.softmax.scores_per_thread == 128
    assert report.tmem_columns == (512, 512)


def test_moves_to_uniform_registers_are_shown_beside_a_softmax(kernel):
    """Of 128 scores each: 128 x 128 / (128 x 32) times as many for a tile."""
    report = audited(softmax_code(also=["R2UR"] * 3))
    heading, row = listing.softmax_table([report]).splitlines()
    end = heading.index("to uniform") + len("to uniform")
    assert row[:end].split()[-1] == "12"


def test_parts_of_split_keys_need_no_tma_on_their_way_out(kernel):
    variant = BY_NAME["fwd_sm100_bf16_d128_general_split"]
    code = softmax_code(polynomials=4)
    inward = tuple(i for i in code.instructions if not i.opcode.startswith("UTMASTG"))
    moved = {name: at - 1 for name, at in code.labels.items()}
    report = audited(replace(code, instructions=inward, labels=moved), variant=variant)
    assert report.verdict == (
        "tcgen05.mma, TMA in, tensor memory read and written, no local memory: ok"
    )


def test_the_loop_that_counts_is_the_one_that_masks_nothing_even_if_it_is_longer(kernel):
    softmax = audited(softmax_code()).softmax
    assert softmax.by_meaning.get("select", 0) == 0
    assert softmax.instructions > max(softmax.other_loops)


def test_a_loop_with_a_body_of_each_kind_has_an_iteration_of_each():
    body = [("MUFU.EX2", "")] * 16 + [("F2FP.BF16.F32.PACK_AB", "")] * 8
    masked = [("FSEL", "")] * 32 + body
    opcodes = [
        ("BRA", "`(.L_x_1)", "P0"),
        *body,
        ("BRA", "`(.L_x_2)"),
        *masked,
        ("BRA", "`(.L_x_0)", "P1"),
        ("EXIT", ""),
    ]
    join = len(opcodes) - 2
    labels = {".L_x_0": 0, ".L_x_1": join - len(masked), ".L_x_2": join}
    code = Code("k", tuple(Instruction(*each) for each in opcodes), labels)
    found = machine_code.softmax_loops(code, rounded=1)
    assert [(main.scores, main.counts["select"]) for main in found] == [(16, 0), (16, 32)]
    assert [main.counts["all"] for main in found] == [27, 58]


@pytest.mark.parametrize(
    "code, complaint",
    [
        (softmax_code("STL"), "1 instructions use local memory"),
        (softmax_code("LDGSTS.E"), "1 cp.async, which TMA should replace"),
        (softmax_code("HMMA.16816.F32"), "1 mma.sync, which tcgen05.mma should replace"),
        (softmax_code(polynomials=8), "polynomials for 25.0% of exponentials, not 18.8%"),
        (Code("k", (Instruction("EXIT"),), {}), "no tcgen05.mma; no tma load; no tma store"),
        (Code("k", (Instruction("EXIT"),), {}), "no loop that takes exponentials"),
    ],
)
def test_a_bad_kernel_is_told_what_is_wrong(kernel, code, complaint):
    assert complaint in audited(code).verdict


@pytest.mark.parametrize(
    ("name", "capacity"),
    [
        (FORWARD.name, 227 * 1024),
        ("fwd_sm80_bf16_d128_full", 163 * 1024),
        ("fwd_sm80_bf16_d64_full", 99 * 1024),
    ],
)
def test_spills_and_too_much_shared_memory_are_problems(kernel, monkeypatch, name, capacity):
    monkeypatch.setattr(cubins, "kernels", lambda path: (replace(kernel, stack_bytes=8),))
    problems = audit.resources(BY_NAME[name], None, [capacity + 1]).problems
    assert problems[0] == "spills: 8 bytes of stack"
    assert problems[1] == f"shared memory of {capacity + 1} bytes is more than {capacity}"


@pytest.mark.parametrize(
    ("capability", "launch", "ctas", "bound"),
    [
        ("8.6", Launch(128, 231, 50176), 2, "shared memory"),
        ("8.6", Launch(128, 231, 50177), 1, "shared memory"),
        ("8.0", Launch(128, 231, 50176), 2, "registers"),
        ("9.0", Launch(256, 128, 1024), 2, "registers"),
        ("9.0", Launch(256, 121, 1024), 2, "registers"),
        ("9.0", Launch(256, 120, 1024), 2, "registers"),
        ("12.0", Launch(512, 32, 0), 3, "warps"),
        ("8.6", Launch(32, 32, 0), 16, "CTAs"),
        ("9.0", Launch(384, 168, 227 * 1024), 1, "shared memory"),
        ("9.0", Launch(384, 255, 227 * 1024), 0, "registers"),
    ],
)
def test_occupancy_is_that_of_the_scarcest_resource(capability, launch, ctas, bound):
    assert occupancy.occupancy(capability, launch) == (ctas, bound)


def test_every_capability_has_limits():
    assert {name for arch in ARCHS for name in arch.capabilities} == occupancy.LIMITS.keys()


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_plans_know_the_shared_memory_of_a_cta(arch):
    """What the smallest SM of the family has, but for the share of the system."""
    smallest = min(occupancy.LIMITS[name].shared_bytes for name in arch.capabilities)
    of_mma_sync = arch.kernels("fwd").folder == "mma_sync"
    known = smem_capacity(arch.target) if of_mma_sync else SMEM_CAPACITY_BYTES
    assert known == smallest - occupancy.SYSTEM_BYTES


def test_what_another_family_borrows_fits_its_gpus_too():
    lent, own = "bwd_sm80_bf16_d256_general_bias", "bwd_sm80_bf16_d256_general"
    assert audit.smem_capacity(BY_NAME[lent]) == 99 * 1024
    assert audit.smem_capacity(BY_NAME[own]) == 163 * 1024


def test_occupancy_is_shown_by_capability_where_it_differs(kernel, monkeypatch):
    monkeypatch.setattr(cubins, "kernels", lambda path: (replace(kernel, registers=112),))
    report = audit.resources(BY_NAME["fwd_sm80_bf16_d64_full"], None, [50176])
    (row,) = [line for line in listing.resource_table([report]).splitlines() if "fwd_sm80" in line]
    assert "8.0: 3 (shared memory), 8.7: 3 (shared memory), 8.6: 2 (shared memory), 8.9: 2 " in row


def test_a_plan_that_does_not_fit_is_a_problem(kernel, monkeypatch):
    crowded = replace(blackwell_forward(FORWARD.key), softmax_registers=240)
    monkeypatch.setattr(audit, "choose_config", lambda variant: crowded)
    assert "registers" in audit.resources(FORWARD, None, ()).problems[0]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_has_a_model_a_plan_and_an_expectation(variant):
    for gpu in listing._gpus_for(variant, []):
        model = audit.model(variant, gpu, audit.Lengths())
        assert 0 < model.efficiency <= 1 and model.tflops > 0
    assert audit.plan_of(variant).roles
    assert audit.expectation(variant).needed


@pytest.mark.parametrize("heads, mask", audit.FLASH_ATTENTION_4, ids=str)
def test_the_bound_of_a_tile_is_no_higher_than_flash_attention_4s(heads, mask):
    (variant,) = (
        v
        for v in VARIANTS
        if v.name.startswith("fwd_sm100_bf16")
        and ((v.key.head_dim, v.key.value_dim), v.key.mask) == (heads, mask)
    )
    (gpu,) = listing._gpus_for(variant, [])
    ours = audit.model(variant, gpu, audit.Lengths()).cycles
    _, special, issue = listing.flash_attention_4(variant)
    theirs = max(ours["mma"], float(special), float(issue))
    assert max(ours["mma"], ours["exp2"], ours["issue"]) <= theirs
    if heads == (64, 64) and mask == "full":
        assert ours["exp2"] < 0.75 * theirs


# -------------------------------------------------------------------------------- tensor memory

HAND_OVER = """
.target sm_100f
.visible .entry kernel(
	.param .u64 out
)
{
	add.s32 	%r2, %r1, 8;
	@%p0 bra 	$product;
$loop:
	{
	.reg .pred 	P1;
	LAB_WAIT:
	mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r3, 10000000;
	@P1 bra.uni DONE;
	bra.uni 	LAB_WAIT;
	DONE:
	}
	tcgen05.fence::after_thread_sync;
	tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r5];
	tcgen05.wait::ld.sync.aligned;
	tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5], {%r4};
	tcgen05.wait::st.sync.aligned;
	tcgen05.fence::before_thread_sync;
	bar.warp.sync 	-1;
	@%p1 bra 	$other;
	mbarrier.arrive.shared.b64 %rd1, [%r2], %r6;
$other:
	@%p2 bra 	$loop;
	bar.sync 	0;
	tcgen05.dealloc.cta_group::1.sync.aligned.b32 	%r5, %r7;
	ret;
$product:
	{
	LAB_WAIT:
	mbarrier.try_wait.parity.shared.b64 P1, [%r1+8], %r3, 10000000;
	@!P1 bra.uni LAB_WAIT;
	}
	tcgen05.fence::after_thread_sync;
	tcgen05.mma.cta_group::1.kind::f16 [%r4], %rd1, %rd2, %r5, %p2;
	tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 	[%r1];
	ret;
}
"""
"""A thread takes S over from a product, and hands P back."""


def without(text, *substrings):
    """``text`` with empty lines in place of those that hold one of ``substrings``."""
    lines = text.split("\n")
    return "\n".join("" if any(part in line for part in substrings) else line for line in lines)


def line_of(text, part):
    return next(i for i, line in enumerate(text.split("\n"), 1) if part in line)


@pytest.mark.parametrize(
    "removed, at, complaint",
    [
        ("wait::ld", "tcgen05.st", "st without tcgen05.wait::ld behind the ld of line"),
        ("wait::ld", "fence::before", "before without tcgen05.wait::ld behind the ld of line"),
        ("wait::st", "fence::before", "before without tcgen05.wait::st behind the st of line"),
        ("fence::before", "arrive.shared.b64", "arrive without tcgen05.fence::before_thread_sync"),
        ("fence::after", "tcgen05.ld", "ld without tcgen05.fence::after_thread_sync behind"),
        ("fence::after", "tcgen05.mma", "mma without tcgen05.fence::after_thread_sync behind"),
        ("tcgen05.fence", "tcgen05.ld", "ld without tcgen05.fence::after_thread_sync behind"),
    ],
)
def test_a_missing_wait_or_fence_is_told_with_its_line(removed, at, complaint):
    assert ptx_text.complaints(HAND_OVER) == ()
    told = f"PTX line {line_of(HAND_OVER, at)}: {complaint}"
    assert any(each.startswith(told) for each in ptx_text.complaints(without(HAND_OVER, removed)))


def test_a_barrier_between_threads_that_share_columns_needs_both_fences():
    shared = HAND_OVER.replace("\ttcgen05.st.", "\tbar.sync 	1, 256;\n\ttcgen05.st.")
    told = " ".join(ptx_text.complaints(shared))
    assert "sync without tcgen05.fence::before" in told
    assert "st without tcgen05.fence::after" in told
    fences = [f"\ttcgen05.fence::{where}_thread_sync;\n" for where in ("before", "after")]
    fenced = "\tbar.sync 	1, 256;\n".join(fences)
    assert ptx_text.complaints(shared.replace("\tbar.sync 	1, 256;\n", fenced)) == ()


def test_a_wait_on_one_of_two_paths_is_not_enough():
    skipped = HAND_OVER.replace("\ttcgen05.wait::st", "\t@%p3 bra $skip;\n\ttcgen05.wait::st")
    skipped = skipped.replace("\ttcgen05.fence::before", "$skip:\n\ttcgen05.fence::before")
    assert any("tcgen05.wait::st" in each for each in ptx_text.complaints(skipped))


def test_texts_that_differ_in_target_and_names_are_read_once(monkeypatch):
    ptx_text.complaints(HAND_OVER)
    monkeypatch.delattr(ptx_text, "_events")
    other = HAND_OVER.replace("sm_100f", "sm_110f").replace("entry kernel", "entry kernel_110")
    assert ptx_text.complaints(other) == ()


def test_ptx_that_is_laid_out_otherwise_is_not_passed_over():
    with pytest.raises(ValueError, match="does not begin its line"):
        ptx_text.complaints(HAND_OVER.replace("aligned;\n\ttcgen05.st", "aligned; tcgen05.st"))


def compiled_ptx():
    """Variant -> PTX of the extension's kernels for tensor memory."""
    folder = Path(jax_fa._jax_fa.__file__).parent / "ptx"
    return {
        variant: text.decode()
        for variant in VARIANTS
        if audit.expectation(variant).mma == "tcgen05.mma"
        and (text := ptx_archives.read(folder, variant.name)) is not None
    }


def single_removals(text):
    """PTX without one wait or fence that no other one makes redundant, by what was removed."""
    lines = text.split("\n")
    numbers = {
        name: [i for i, line in enumerate(lines) if f"tcgen05.{name}" in line]
        for name in ("wait::ld", "wait::st", "fence::before", "fence::after")
    }
    # The first fences are those of the allocation; of several waits, the last one counts.
    before = numbers["fence::before"][1]
    chosen = {"wait::st": numbers["wait::st"][-1], "fence::after": numbers["fence::after"][1]}
    chosen["fence::before"] = before
    chosen["wait::ld"] = max(i for i in numbers["wait::ld"] if i < before)
    for name, number in chosen.items():
        yield name, "\n".join(["" if i == number else line for i, line in enumerate(lines)])


def test_every_compiled_kernel_has_its_waits_and_fences_and_misses_one():
    kernels = compiled_ptx()
    if not kernels:
        pytest.skip("this build holds no PTX with tensor memory")
    assert {v.name: ptx_text.complaints(text) for v, text in kernels.items()} == {
        v.name: () for v in kernels
    }
    for variant, text in kernels.items():
        if variant.arch != "sm100" or variant.key.mask != "full" or variant.key.has_soft_cap:
            continue
        assert ptx_text.complaints(without(text, "tcgen05.fence")), variant.name
        for name, faulty in single_removals(text):
            assert any(name in told for told in ptx_text.complaints(faulty)), (variant.name, name)


# ------------------------------------------------------------------------------ the command line


def test_without_a_folder_the_model_is_printed_as_a_model(capsys, tmp_path):
    path = tmp_path / "out.json"
    arguments = ["--variants", "fwd_sm*_bf16_d128_full", "--banks", "--json", str(path)]
    assert listing.main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Model, computed from published rates")
    assert "fwd_sm100_bf16_d128_full      B200" in printed
    variants = json.loads(path.read_text())["variants"]
    assert {variant["name"] for variant in variants} == {
        f"fwd_{arch}_bf16_d128_full"
        for arch in ("sm90", "sm100", "sm103", "sm110", "sm80", "sm86", "sm120")
    }
    assert all(variant["models"][0]["cycles"]["mma"] for variant in variants)


def test_gpus_can_be_chosen_and_the_problem_too(capsys):
    arguments = ["--variants", "fwd_sm90_bf16_d128_causal", "--gpu", "H100", "H200"]
    assert listing.main([*arguments, "--q-len", "1", "--kv-len", "4096"]) == 0
    printed = capsys.readouterr().out
    assert "1 queries in\n16 heads, 4096 keys" in printed
    assert "H100" in printed and "H200" in printed


@pytest.mark.parametrize(("gpu", "modelled"), [("B300", "B300"), ("Thor", "B200")])
def test_a_variant_is_modelled_for_gpus_of_other_families_that_run_it(gpu, modelled, capsys):
    assert listing.main(["--variants", "bwd_sm100_bf16_d128_full", "--gpu", gpu]) == 0
    assert f"bwd_sm100_bf16_d128_full  {modelled}" in capsys.readouterr().out


def test_roofline_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "roofline.png"
    assert listing.main(["--variants", "*_d64_full", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_variants_at_one_roof_are_named_in_few_words():
    every = [v for v in VARIANTS if v.arch == "sm100" and v.key.dtype == "bfloat16"]
    assert listing._summary(every, every) == "fwd; fwd cap; bwd; bwd cap; dbias"
    group = [
        v
        for v in every
        if v.operation == "fwd"
        and not v.key.has_soft_cap
        and (v.key.head_dim in (128, 192) or (v.key.head_dim == 64 and v.key.mask == "causal"))
    ]
    assert listing._summary(group, every) == "fwd 64 causal, 128, 192/128"


def packed(text):
    return ptx_archives.packed({FORWARD.name: text.encode()})


def test_reports_are_printed_and_a_problem_is_the_exit_status(
    kernel, tmp_path, monkeypatch, capsys
):
    (tmp_path / f"{FORWARD.name}.o").touch()
    monkeypatch.setattr(machine_code, "find_nvdisasm", lambda: tmp_path)
    monkeypatch.setattr(machine_code, "disassemble", lambda path, nvdisasm: (softmax_code(),))
    path = tmp_path / "out.json"
    ptx = tmp_path / ptx_archives.archive_of(FORWARD.name)
    assert listing.main([str(tmp_path)]) == 1
    assert "no PTX to check" in capsys.readouterr().out
    ptx.write_bytes(packed(without(HAND_OVER, "wait::st")))
    assert listing.main([str(tmp_path), "--no-sass"]) == 1
    line = line_of(HAND_OVER, "fence::before")
    assert f"{FORWARD.name}: PTX line {line}: before without" in capsys.readouterr().out
    ptx.write_bytes(packed(HAND_OVER))
    assert listing.main([str(tmp_path), "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"{FORWARD.name}: tcgen05.mma, TMA both ways" in printed
    assert "tensor memory handed over in order: ok" in printed
    assert "18.8%" in printed
    (found,) = json.loads(path.read_text())["variants"]
    assert found["verdict"].endswith(": ok") and found["counts"]["tcgen05.mma"] == 1
    monkeypatch.setattr(machine_code, "disassemble", lambda path, nvdisasm: (softmax_code("LDL"),))
    assert listing.main([str(tmp_path)]) == 1
    assert "1 instructions use local memory" in capsys.readouterr().out


def test_an_empty_folder_and_a_missing_disassembler_are_told(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        listing.main([str(tmp_path), "--no-sass"])
    assert "python -m jax_fa.aot writes objects" in capsys.readouterr().err
    monkeypatch.setattr(machine_code, "find_nvdisasm", lambda: None)
    with pytest.raises(SystemExit):
        listing.main([str(tmp_path)])
    assert "pip install nvidia-cuda-nvdisasm" in capsys.readouterr().err


def test_a_roofline_has_a_marker_for_each_operation():
    assert set(listing._MARKERS) == set(OPERATIONS)
