"""The Blackwell forward: its plan, and one compiled kernel on the emulator."""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from helpers.oracle import Results, assert_close, tolerance
from helpers.recording import needs_compiler, needs_dsl, prebuilt, record
from helpers.remembered import emulate

from jax_fa.analysis import roofline
from jax_fa.analysis.plan_ledger import ledger
from jax_fa.emulator import Memory
from jax_fa.kernels.edges import (
    REGISTERS_PER_SM,
    SMEM_CAPACITY_BYTES,
    Edge,
    PlanError,
    arrivals,
)
from jax_fa.kernels.sm100 import plan
from jax_fa.kernels.sm100.tensor_plan import TmemRange, check
from jax_fa.spec import abi, division
from jax_fa.spec.arch import ARCHS, arch_named
from jax_fa.spec.band import UNBOUNDED, Band
from jax_fa.spec.config import choose_forward
from jax_fa.spec.key import MASK_CLASSES, KernelKey
from jax_fa.spec.problem import Operands, Semantics

KEYS = [
    KernelKey(arch.target, "bfloat16", d, dv, mask)
    for arch in ARCHS
    if arch.kernels("fwd").folder == "sm100"
    for d, dv in arch.kernels("fwd").heads
    for mask in MASK_CLASSES
]

# ---------------------------------------------------------------------------------------- the plan


def plan_for(key):
    return plan.forward_plan(key, choose_forward(key))


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_every_plan_fits_the_hardware(key):
    made = plan_for(key)
    assert sum(role.threads * role.registers for role in made.roles) <= REGISTERS_PER_SM
    cut = plan.tiling(key, choose_forward(key))
    # With two query tiles, mma holds all parts of a block of values while it waits for keys.
    held = cut.v_parts + cut.k_parts if cut.q_tiles == 2 else 1
    assert made.edge("kv").stages > held
    assert made.smem_bytes <= SMEM_CAPACITY_BYTES


def test_polynomials_are_left_to_targets_with_slow_exponentials():
    shares = {key.arch: choose_forward(key).polynomials for key in KEYS if key.head_dim == 64}
    assert shares["sm_100f"] > 0 and shares["sm_103f"] == 0


def test_a_head_size_without_a_kernel_is_refused_with_those_that_have_one():
    with pytest.raises(NotImplementedError, match="80/80.*128/128"):
        choose_forward(KernelKey("sm_100f", "bfloat16", 80, 80, "full"))


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda p: {"tmem": (*p.tmem, TmemRange("more", 100, 4))}, "overlap"),
        (lambda p: {"tmem": (*p.tmem, TmemRange("more", 510, 4))}, "columns 510 to 514"),
        (lambda p: {"roles": (replace(p.roles[0], registers=208), *p.roles[1:])}, "67584"),
        (lambda p: {"roles": (*p.roles[:3], replace(p.roles[3], registers=40), *p.roles[4:])},
         "share a warpgroup"),
        (lambda p: {"edges": (*p.edges, replace(p.edges[0], data="x", producer="lode"))}, "lode"),
        (lambda p: {"edges": (*p.edges, p.edges[0])}, "twice"),
    ],
)  # fmt: skip
def test_a_plan_that_contradicts_itself_is_refused(change, complaint):
    made = plan_for(KEYS[0])
    with pytest.raises(PlanError, match=complaint):
        check(replace(made, **change(made)))


def test_blocks_of_a_size_that_the_roles_do_not_take_are_refused():
    config = choose_forward(KEYS[0])
    with pytest.raises(PlanError, match="128 keys at a time, not 64"):
        plan.forward_plan(KEYS[0], replace(config, block_kv=64))


def pair_and_single():
    """Plans of the same kernel for a pair of CTAs and for one."""
    key = KernelKey("sm_100f", "bfloat16", 128, 128, "full")
    config = choose_forward(key)
    return plan.forward_plan(key, config), plan.forward_plan(key, replace(config, ctas=1))


def test_full_masks_of_large_heads_are_worked_on_in_pairs():
    paired = {(key.head_dim, key.mask) for key in KEYS if plan_for(key).ctas == 2}
    assert paired == {(128, "full"), (192, "full"), (256, "full")}
    with pytest.raises(PlanError, match="causal mask"):
        key = KernelKey("sm_100f", "bfloat16", 128, 128, "causal")
        plan.forward_plan(key, replace(choose_forward(key), ctas=2))


def test_pairs_are_for_heads_that_keep_shared_memory_as_busy_as_the_slowest_other_unit():
    gpu = roofline.gpu_of("sm100")
    for heads in arch_named("sm100").kernels("fwd").heads:
        config = choose_forward(KernelKey("sm_100f", "bfloat16", *heads, "full"))
        q_tiles = config.block_q // 128
        busy = {}
        for ctas in (1, 2):
            cycles = roofline.forward(gpu, heads, config.polynomials / 128, ctas=ctas)
            busy[ctas] = cycles.smem + roofline.fill_cycles(heads, ctas * q_tiles)
        others = max(cycles._replace(smem=0))
        # Half of 96 columns is no whole panel of a swizzle.
        assert (config.ctas == 2) == (busy[1] >= others and heads != (96, 96))
        assert busy[config.ctas] < others or heads == (96, 96)


def test_a_cta_of_a_pair_loads_half_of_every_block_and_arrives_at_the_first():
    pair, single = pair_and_single()
    assert single.edge("kv").stage_bytes == 2 * pair.edge("kv").stage_bytes
    assert pair.edge("kv").stages == 2 * single.edge("kv").stages
    crossing = {edge.data for edge in pair.edges if pair.crosses(edge)}
    tiles = {f"{data}{i}" for data in ("s", "p", "p_rest", "scaled") for i in (0, 1)}
    assert crossing == {"q", "kv", "o", *tiles}
    assert not any(single.crosses(edge) for edge in single.edges)
    for edge in pair.edges:
        counts = [[arrivals(p, p.edge(edge.data), "full") for p in (pair, single)]]
        counts += [[arrivals(p, p.edge(edge.data), "empty") for p in (pair, single)]]
        factor = 2 if edge.data in crossing and edge.kind == "threads" else 1
        assert all(of_pair == factor * of_one for of_pair, of_one in counts), edge.data


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda p: {"ctas": 3}, "not 3"),
        (lambda p: {"ctas": 1}, "no pairs"),
        (lambda p: {"edges": (replace(p.edges[0], kind="tma"), *p.edges[1:])}, "q crosses"),
        (lambda p: {"edges": (*p.edges, Edge("x", "mma", "load", 1, 0, "told", "", "threads"))},
         "threads of mma arrive in one CTA"),
        (lambda p: {"edges": (*p.edges, Edge("x", "load", "mma", 1, 0, "told", "done", "threads"))},
         "threads of mma arrive in one CTA"),
    ],
)  # fmt: skip
def test_a_pair_whose_ctas_would_miss_each_other_is_refused(change, complaint):
    made, _ = pair_and_single()
    with pytest.raises(PlanError, match=complaint):
        check(replace(made, **change(made)))


def test_the_ledger_tells_what_crosses_a_pair():
    pair, single = pair_and_single()
    assert re.search(r"^p0 +softmax0 => mma .*full\(8\)", ledger(pair), re.M)
    assert re.search(r"^mma .*first of 2 CTAs only$", ledger(pair), re.M)
    assert "=>" not in ledger(single)


def test_the_ledger_names_every_edge_and_its_arrivals():
    made = plan_for(KEYS[0])
    text = ledger(made)
    assert all(re.search(rf"^{edge.data} .*full\(\d", text, re.M) for edge in made.edges)
    assert "over s0: Note [P overwrites S]" in text and "Note [P overwrites S]" in plan.__doc__


# -------------------------------------------------------------------------------------- one kernel


def run(built, key, lengths, heads, seed, stretch=1):
    """Results of a call on one multiprocessor or pair, the tolerance, and the emulator's report.

    Scores are about ``stretch`` in size.
    """
    (q_len, kv_len), (num_q_heads, num_kv_heads) = lengths, heads
    random = np.random.default_rng(seed)
    shapes = (
        (1, q_len, num_q_heads, key.head_dim),
        (1, kv_len, num_kv_heads, key.head_dim),
        (1, kv_len, num_kv_heads, key.value_dim),
    )
    dtype = getattr(ml_dtypes, key.dtype, key.dtype)
    q, k, v = (random.standard_normal(shape).astype(dtype) for shape in shapes)
    q = (stretch * q.astype(np.float32)).astype(dtype)
    out = np.full((*q.shape[:3], key.value_dim), np.nan, q.dtype)
    lse = np.full(q.shape[:3], np.nan, np.float32)
    memory, scale = Memory(), key.head_dim**-0.5
    arrays = {"q": q, "k": k, "v": v, "out": out}
    values: dict[str, float] = {
        name: memory.add(name, array.view(np.uint16)) for name, array in arrays.items()
    }
    values |= {"lse": memory.add("lse", lse), "scale": scale, "soft_cap": 1.0}
    values |= {"batch": 1, "num_sequences": 1, "q_len": q_len, "kv_len": kv_len, "num_sms": 1}
    values |= {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads}
    values |= {"head_dim": key.head_dim, "value_dim": key.value_dim}
    values |= {"window_left": UNBOUNDED, "window_right": UNBOUNDED}
    (launch,) = record(built, abi.FORWARD, values)
    report = emulate(built.ptx, launch, memory, seed=seed)
    wanted = tolerance(Operands(q, k, v), Semantics(scale, Band(key.mask == "causal")))
    return Results(out, lse), wanted, report


@needs_dsl
@needs_compiler
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of the DSL, within the DSL
@pytest.mark.parametrize(
    "key, seeds",
    [
        (KernelKey("sm_100f", "bfloat16", 64, 64, "full"), (1,)),
        (KernelKey("sm_100f", "float16", 192, 128, "causal"), (2,)),
        (KernelKey("sm_100f", "bfloat16", 256, 256, "causal"), (3, 4)),
    ],
    ids=str,
)
def test_a_compiled_kernel_is_right_on_the_emulator(tmp_path, key, seeds):
    """The last query tile partly used; several key blocks, the last partly used."""
    built = prebuilt(tmp_path, "sm100.fwd", key, choose_forward(key))
    for seed in seeds:
        results, wanted, _ = run(built, key, (200, 300), (2, 1), seed)
        assert_close(results, wanted, key.dtype)
    if key.dtype == "bfloat16" and key.mask == "full":
        # Exponents far below the smallest; products whose rounding exceeds the tolerance of maxima.
        for stretch in (64, 2**26):
            results, wanted, _ = run(built, key, (200, 300), (2, 1), 5, stretch)
            assert_close(results, wanted, key.dtype)


@needs_dsl
@needs_compiler
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.parametrize("head_dim, value_dim", [(128, 128), (192, 128), (256, 256)])
def test_a_pair_of_ctas_is_right_on_the_emulator(tmp_path, head_dim, value_dim):
    """An odd number of query blocks: the second CTA's last one has no rows. Several schedules."""
    key = KernelKey("sm_100f", "bfloat16", head_dim, value_dim, "full")
    assert choose_forward(key).ctas == 2
    built = prebuilt(tmp_path, "sm100.fwd", key, choose_forward(key))
    for seed in range(5):
        results, wanted, report = run(built, key, (600, 300), (1, 1), seed)
        assert_close(results, wanted, "bfloat16")
    check_traffic(report, key, -(-600 // choose_forward(key).block_q))
    # One query block by head, too full to be packed: of three that share keys, two make a pair, and
    # one is left over.
    results, wanted, report = run(built, key, (choose_forward(key).block_q - 8, 300), (6, 2), 5)
    assert_close(results, wanted, "bfloat16")
    check_traffic(report, key, 3, 2)


def check_traffic(report, key, q_blocks, kv_heads=1):
    """What a pair moves, if each of ``kv_heads`` has ``q_blocks`` and 3 blocks of keys."""
    head_dim, value_dim = key.head_dim, key.value_dim
    # In a turn, a pair loads 2 or 4 query tiles, and once for both CTAs 3 key and value blocks.
    q_tiles = 2 * choose_forward(key).block_q // 128
    turns = -(-q_blocks // 2) * kv_heads
    loaded = q_tiles * 128 * head_dim + 3 * 128 * (head_dim + value_dim)
    assert report.counters["bytes TMA load"] == 2 * turns * loaded
    # The products of each query tile read its Q from shared memory, and half of K and V.
    read = q_tiles * 3 * 128 * (head_dim + (head_dim + value_dim) // 2)
    assert report.counters["bytes tcgen05.mma operands"] == 2 * turns * read


@needs_dsl
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.parametrize("block_q", [128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 8, 12, 16, 32, 71])
def test_packed_tiles_hold_every_position_of_every_head_once(group, block_q):
    from jax_fa.kernels import tiles

    packing, num_kv_heads = division.packing(block_q, group), 2
    for kv_head in range(num_kv_heads):
        seen = []
        for unit in range(packing.units):
            head = kv_head * packing.units + unit
            for first in range(0, 3 * packing.positions, packing.positions):
                tile = tiles.Tile(True, 0, first // packing.positions, head, kv_head, 0)
                rows = [tiles.row_at(packing, tile, first, row) for row in range(block_q)]
                # What query tiles derive their key blocks from.
                assert [row.position for row in rows[:: division.GRANULE]] == sorted(
                    row.position for row in rows[:: division.GRANULE]
                )
                seen += [(row.position, row.head) for row in rows if row.is_there]
        heads = range(kv_head * group, (kv_head + 1) * group)
        assert sorted(seen) == [(p, h) for p in range(3 * packing.positions) for h in heads]


@needs_dsl
@needs_compiler
@pytest.mark.filterwarnings("default::DeprecationWarning")
def test_heads_of_a_group_share_tiles_of_short_queries(tmp_path):
    key = KernelKey("sm_100f", "bfloat16", 64, 64, "general")
    built = prebuilt(tmp_path, "sm100.fwd", key, choose_forward(key))
    flops = {}
    for num_q_heads in (2, 16):
        results, wanted, report = run(built, key, (1, 300), (num_q_heads, 2), seed=num_q_heads)
        assert_close(results, wanted, "bfloat16")
        flops[num_q_heads] = report.counters["flops tcgen05.mma"]
    # Eight heads cost what one does: a CTA's rows against 3 blocks of keys, for 2 key heads.
    assert flops[16] == flops[2] == 2 * 3 * 2 * 2 * 256 * 128 * 64
    for seed in range(5):
        results, wanted, _ = run(built, key, (70, 300), (6, 2), seed)
        assert_close(results, wanted, "bfloat16")
