"""Keys of a query tile that several CTAs share: when, in which parts, and the merged result."""

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
from helpers.cases import BY_NAME, make
from helpers.oracle import Results, assert_close, tolerance
from helpers.recording import needs_compiler, needs_dsl, prebuilt, record
from helpers.remembered import emulate

from jax_fa.emulator import Memory
from jax_fa.runtime import dispatch
from jax_fa.runtime.dispatch import Target
from jax_fa.spec import abi, division, schema, scratch, variants
from jax_fa.spec.arch import ARCHS
from jax_fa.spec.band import Band, Blocks, part_of
from jax_fa.spec.config import choose_forward
from jax_fa.spec.key import KernelKey
from jax_fa.spec.problem import Problem, Semantics

DECODE = Problem(
    dtype="bfloat16",
    batch=2,
    num_sequences=2,
    q_len=1,
    kv_len=16384,
    num_q_heads=8,
    num_kv_heads=2,
    head_dim=128,
    value_dim=128,
    semantics=Semantics(128**-0.5, Band()),
    present=("kv_lengths",),
)
LONG = 1 << 17
"""Keys for as many parts as there are multiprocessors."""
PACKED = ("cu_seqlens_q", "cu_seqlens_k")
ALL = Target("cuda", frozenset(variants.BY_NAME))

# ----------------------------------------------------------------------------------- how many parts


def test_few_tiles_over_many_keys_are_split_until_the_multiprocessors_are_busy():
    alone = replace(DECODE, num_kv_heads=8, kv_len=LONG)
    assert variants.kv_splits(alone) == division.RESIDENT_CTAS // 16
    assert (
        variants.kv_splits(replace(alone, batch=1, num_sequences=1)) == division.RESIDENT_CTAS // 8
    )
    assert (
        variants.kv_splits(replace(DECODE, num_q_heads=1, num_kv_heads=1))
        == 16384 // variants.SPLIT_KEYS
    )


def test_heads_that_share_a_tile_count_once():
    assert division.packing(variants.SPLIT_ROWS, 4) == division.Packing(
        heads=4, positions=32, units=1, group=4
    )
    for q_len, tiles in ((1, 4), (32, 4), (33, 8), (64, 8)):
        problem = replace(DECODE, q_len=q_len, kv_len=LONG)
        assert variants.kv_splits(problem) == division.RESIDENT_CTAS // tiles
    # Sharing would leave as many tiles.
    assert (
        variants.kv_splits(replace(DECODE, q_len=100, kv_len=LONG)) == division.RESIDENT_CTAS // 16
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_len": 2 * variants.SPLIT_KEYS - 1},
        {"num_q_heads": division.RESIDENT_CTAS // 2, "num_kv_heads": division.RESIDENT_CTAS // 2},
        {"q_len": 4096},
        {"batch": 64, "num_sequences": 64, "num_kv_heads": 8},
        {"batch": 64, "num_sequences": 64, "q_len": 64, "kv_len": 1024},
        {"batch": 64, "num_sequences": 64, "kv_len": 128},
        {"batch": 1, "q_len": 64, "num_sequences": 64, "present": PACKED},
        {"batch": 1, "q_len": 2, "num_sequences": 20, "kv_len": 10000, "present": PACKED},
    ],
    ids=str,
)
def test_many_tiles_or_few_keys_are_not_split(fields):
    assert variants.kv_splits(replace(DECODE, **fields)) == 1


def test_tiles_are_split_in_two_where_heads_that_share_them_save_more_than_merging_costs():
    many = replace(DECODE, batch=64, num_sequences=64, kv_len=4096)
    short = {"kv_len": 512, "num_q_heads": 32, "num_kv_heads": 8}
    for fields in ({}, {"q_len": 8}, short, {"num_q_heads": 64, "num_kv_heads": 8}):
        assert variants.kv_splits(replace(many, **fields)) == 2, fields
    narrow = replace(many.semantics, band=Band(left=100, right=0))
    assert variants.kv_splits(replace(many, semantics=narrow)) == 1


def test_packed_sequences_count_with_their_mean_length():
    packed = replace(
        DECODE,
        batch=1,
        q_len=2,
        num_sequences=2,
        present=PACKED,
        kv_len=LONG,
    )
    assert variants.kv_splits(packed) == division.RESIDENT_CTAS // 4
    assert variants.kv_splits(replace(packed, kv_len=4 * variants.SPLIT_KEYS)) == 2


def test_scratch_holds_one_result_for_each_part_and_none_without():
    assert scratch.shapes("fwd", DECODE, 1) == {}
    shapes = scratch.shapes("fwd", DECODE, 5)
    assert list(shapes) == [array.name for array in schema.FORWARD_SCRATCH]
    assert shapes["out_parts"] == ((5, 2, 1, 8, 128), "float32")
    assert shapes["lse_parts"] == ((5, 2, 1, 8), "float32")


# -------------------------------------------------------------------------------------- few queries


@pytest.mark.parametrize(
    ("fields", "tiles"),
    [
        ({}, 4),
        ({"q_len": 4}, 4),
        ({"q_len": 5}, 8),
        ({"num_q_heads": 40, "num_kv_heads": 2}, 8),
        ({"num_q_heads": 2, "q_len": 16}, 4),
        ({"batch": 1, "q_len": 6, "present": PACKED}, 2 * 3),
    ],
    ids=str,
)
def test_sixteen_rows_of_all_heads_that_share_keys_are_a_tile(fields, tiles):
    assert variants.few_tiles(replace(DECODE, **fields)) == tiles


def test_queries_are_few_where_their_tiles_are_no_more_than_those_of_other_kernels():
    for heads in (2, 8, 16, 32):
        group = {"num_q_heads": heads}
        assert all(variants.has_few_queries(replace(DECODE, q_len=t, **group)) for t in (1, 7, 16))
        assert not variants.has_few_queries(replace(DECODE, q_len=17, **group))


def test_keys_of_few_queries_are_split_until_two_tiles_run_on_each_multiprocessor():
    for batch, parts in ((1, 64), (2, 64), (16, 8), (64, 2), (66, 2), (67, 1), (400, 1)):
        problem = replace(DECODE, batch=batch, num_sequences=batch)
        assert variants.few_parts(problem) == parts
    assert variants.few_parts(replace(DECODE, kv_len=2 * variants.FEW_KEYS - 1)) == 1
    most = replace(DECODE, batch=1, num_sequences=1, num_kv_heads=1, kv_len=LONG)
    assert variants.few_parts(most) == division.RESIDENT_CTAS


# ------------------------------------------------------------------------------------ which variant


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_a_split_variant_of_the_general_mask_serves_every_mask(arch):
    for band in (Band(), Band(is_causal=True), Band(left=5)):
        problem = replace(DECODE, semantics=Semantics(1.0, band), present=())
        found = variants.find(problem, arch)
        assert found.key.is_split and found.key.mask == "general"
        assert found.name.endswith(
            "_general_few" if arch.kernels("few").heads else "_general_split"
        )


LACKING = {"fwd_sm90_bf16_d128_general_split", "fwd_sm90_bf16_d128_general_few"}


@pytest.mark.parametrize(
    "problem, compiled",
    [
        (replace(DECODE, semantics=Semantics(1.0, soft_cap=30.0)), frozenset(variants.BY_NAME)),
        (DECODE, frozenset(name for name, v in variants.BY_NAME.items() if not v.key.is_split)),
        (DECODE, frozenset(variants.BY_NAME) - LACKING),
    ],
    ids=["soft_cap", "not_built", "not_built_for_one_family"],
)
def test_without_a_split_variant_keys_stay_together(problem, compiled):
    served = dispatch.choose(problem, Target("cuda", compiled), None)
    assert served.chosen.num_splits == 1
    assert served.implementation == "cuda" and "fwd_sm90_bf16_d128_general" in served.kernel


def test_only_the_gpus_at_hand_have_to_have_a_split_variant():
    compiled = frozenset(variants.BY_NAME) - LACKING

    def splits(target):
        return dispatch.choose(DECODE, target, None).chosen.num_splits

    assert splits(Target("cuda", compiled, ("10.0",))) == variants.few_parts(DECODE)
    assert splits(Target("cuda", compiled, ("9.0",))) == 1
    assert splits(Target("cuda")) == 1
    assert "_few" in dispatch.choose(DECODE, ALL, None).kernel
    of_old = frozenset(name for name in variants.BY_NAME if not name.endswith("_few"))
    assert splits(Target("cuda", of_old, ("10.0",))) == variants.kv_splits(DECODE)


# ------------------------------------------------------------------------------------ parts of keys


def test_parts_are_disjoint_and_cover_all_blocks():
    """Every part is masked where the whole is, and an empty one lies behind the last block."""
    sizes = range(6)
    for before, full, after, num_parts in itertools.product(sizes, sizes, sizes, range(1, 9)):
        whole = Blocks(3, 3 + before, 3 + before + full, 3 + before + full + after)
        parts = [part_of(whole, i, num_parts) for i in range(num_parts)]
        covered = [block for part in parts for block in range(part.start, part.end)]
        assert covered == list(range(whole.start, whole.end))
        unmasked = [block for part in parts for block in range(part.full_start, part.full_end)]
        assert unmasked == list(range(whole.full_start, whole.full_end))
        assert all(p.start <= p.full_start <= p.full_end <= p.end for p in parts)
        assert all(p.start == whole.end for p in parts if p.start == p.end) or not covered
        longest = max(p.end - p.start for p in parts)
        assert longest == -(-len(covered) // num_parts)
        assert not covered or parts[0].end > parts[0].start


# ------------------------------------------------------------------------------------- the kernels

KEYS = {
    "few": KernelKey("sm_80", "bfloat16", 64, 64, "general", is_split=True, is_few=True),
    "sm90": KernelKey("sm_90a", "float16", 64, 64, "general", is_split=True),
    "sm100": KernelKey("sm_100f", "bfloat16", 64, 64, "general", is_split=True),
}


def run(built, operands, semantics, *, num_splits, seed, options=None):
    """Out and lse of a call on two multiprocessors; what kernels do not write is NaN."""
    p, memory = Problem.of(operands, semantics), Memory()
    rows = (p.batch, p.q_len, p.num_q_heads)
    out = np.full((*rows, p.value_dim), np.nan, operands.q.dtype)
    lse = np.full(rows, np.nan, np.float32)
    arrays = {name: x for name, x in operands._asdict().items() if x is not None}
    arrays |= {"out": out, "lse": lse}
    for name, (shape, dtype) in scratch.shapes("fwd", p, num_splits).items():
        arrays[name] = np.full(shape, np.nan, dtype)
    values: dict[str, float] = {name: memory.add(name, x) for name, x in arrays.items()}
    values |= {x.name: getattr(p, x.name) for x in schema.EXTENTS}
    band = semantics.band
    values |= {"window_left": band.left_bound, "window_right": band.right_bound}
    values |= {"bottom_right": band.alignment == "bottom_right", "num_sms": 2}
    values |= {"scale": semantics.scale, "soft_cap": 1.0, "num_splits": num_splits}
    for launch in record(built, abi.FORWARD, values):
        emulate(built.ptx, launch, memory, seed=seed, options=options)
    return Results(out, lse)


@pytest.fixture(scope="module", params=KEYS, ids=str)
def kernel(request, tmp_path_factory):
    """(compiled kernel, its key)"""
    key = KEYS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    module = "mma_sync.few" if key.is_few else f"{request.param}.fwd_split"
    return prebuilt(folder, module, key, choose_forward(key)), key


@needs_dsl
@needs_compiler
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of the DSL, within the DSL
@pytest.mark.parametrize(
    "name, num_splits",
    [
        ("decode", 1),
        ("decode", 2),
        ("sinks_empty_rows", 5),
        ("packed_gaps_and_used", 2),
        ("segments_without_partner", 3),
    ],
)
def test_parts_merge_to_the_whole_on_the_emulator(kernel, name, num_splits):
    """More parts than key blocks among them, so that some parts see nothing."""
    built, key = kernel
    if num_splits == 1 and not key.is_few:
        pytest.skip("keys of this kernel are always split")
    case = BY_NAME[name]
    operands = make(case, key.dtype).operands
    if case.is_packed:
        # As sequences.with_slot_in_front: rows before the first sequence are a sequence too.
        from jax_fa.runtime.sequences import with_slot_in_front

        operands = jax.device_get(with_slot_in_front(operands))
    wanted = tolerance(operands, case.semantics)
    got = run(built, operands, case.semantics, num_splits=num_splits, seed=num_splits)
    assert_close(got, wanted, key.dtype)
