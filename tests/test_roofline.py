"""The model of what GPUs allow, against published tables and hand-made sums."""

import pytest

from jax_fa.analysis import roofline
from jax_fa.analysis.roofline import GPUS, Cycles, attainable_flops, backward, forward, work
from jax_fa.spec.band import Band
from jax_fa.spec.problem import Problem, Semantics

BY_NAME = {gpu.name: gpu for gpu in GPUS}
B200, B300, THOR, H100, H200 = (BY_NAME[n] for n in ("B200", "B300", "Thor", "H100", "H200"))


def problem(q_len=4096, kv_len=4096, heads=(16, 16), sizes=(128, 128), **band):
    semantics = Semantics(0.1, Band(**band))
    return Problem("bfloat16", 2, 2, q_len, kv_len, *heads, *sizes, semantics)  # type: ignore[call-arg]


# ------------------------------------------------------------------------------- cycles of a tile


@pytest.mark.parametrize(
    "heads, on_b200, on_h100",
    [
        ((64, 64), 512, 1024),
        ((96, 96), 768, 1536),
        ((128, 128), 1024, 2048),
        ((192, 128), 1280, 2560),
        ((256, 256), 2048, 4096),
    ],
)
def test_mma_cycles_of_the_forward_are_the_published_ones(heads, on_b200, on_h100):
    assert forward(B200, heads).mma == on_b200
    assert forward(H100, heads).mma == on_h100


def test_flash_attention_4_table_of_the_forward():
    assert forward(B200, (128, 128))._replace(issue=0) == Cycles(1024, 1024, 0, 768)


def test_flash_attention_4_table_of_the_backward():
    one, two = (backward(B200, (128, 128), ctas=ctas) for ctas in (1, 2))
    assert (one.mma, one.exp2, one.smem) == (2560, 1024, 3328)
    assert (two.mma, two.exp2, two.smem) == (2560, 1024, 2688)
    assert one.bound == two.bound == "smem"
    assert one.efficiency == pytest.approx(0.77, abs=0.005)
    assert two.efficiency == pytest.approx(0.95, abs=0.005)


def test_parts_of_shared_memory_cycles_are_those_of_the_table():
    """S 512, dP 512, dV 256, dK 256, dQ 512; dS written 256, dQ written 512 and read 512."""
    parts = roofline.backward_smem_cycles(B200, (128, 128))
    assert sorted(parts.values()) == [256] * 5 + [512] * 4


def test_two_sweeps_repeat_a_product_and_read_keys_for_every_64_queries():
    cycles = backward(B200, (256, 256), sweeps=2)
    assert (cycles.mma, cycles.repeated, cycles.smem) == (6144, 1024, 9472)
    assert cycles.bound == "smem"
    assert cycles.efficiency == pytest.approx(5120 / 9472)


def test_an_exchange_of_ds_halves_what_is_added_and_costs_what_is_sent():
    """Two CTAs: dQ written and read 256 less each, its k 128 more, dS sent 128, received 128."""
    apart, together = (
        roofline.backward_smem_cycles(B200, (128, 128), staged, ctas=2)
        for staged in (("ds", "dq"), ("ds", "exchange", "dq"))
    )
    assert sum(apart.values()) - sum(together.values()) == 2 * 256 - 3 * 128


def test_a_pair_fetches_queries_twice_and_adds_dq_once():
    one, pair = work(problem(), "bwd", 128), work(problem(), "bwd", 256, copies=2)
    assert one.flops == pair.flops and one.hbm_bytes == pair.hbm_bytes
    rows = 2 * 16 * 4096 * 4096 // 256
    assert one.cta_bytes - pair.cta_bytes == rows * 128 * 4


def test_backward_of_small_heads():
    cycles = backward(B200, (64, 64))
    assert (cycles.mma, cycles.exp2) == (1280, 1024)


def test_exponentials_take_half_the_time_on_b300():
    assert forward(B300, (64, 64)).exp2 == 512
    assert {forward(gpu, (64, 64)).exp2 for gpu in (B200, THOR, H100, H200)} == {1024}


@pytest.mark.parametrize(
    "heads, bound, efficiency",
    [
        ((64, 64), "exp2", 0.5),
        ((96, 96), "exp2", 0.75),
        ((128, 128), "mma", 1.0),
        ((192, 128), "mma", 1.0),
        ((256, 256), "mma", 1.0),
    ],
)
def test_cap_without_polynomials(heads, bound, efficiency):
    cycles = forward(B200, heads)
    assert (cycles.bound, cycles.efficiency) == (bound, efficiency)


def test_cap_of_small_heads_is_half_the_peak():
    half = attainable_flops(B200, forward(B200, (64, 64)), intensity=1e9)
    assert half == pytest.approx(1125e12, rel=2e-3)


def test_polynomials_lift_the_bound_of_small_heads_until_issue_slots_take_over():
    at = {share / 100: forward(B200, (64, 64), share / 100) for share in range(0, 100)}
    best = min(at, key=lambda share: max(at[share]))
    assert best == pytest.approx(0.42, abs=0.011)
    assert max(at[best]) == pytest.approx(597, abs=5)
    assert at[0.41].bound == "exp2" and at[0.43].bound == "issue"
    assert at[best].efficiency == pytest.approx(0.86, abs=0.02)


@pytest.mark.parametrize("share", [0.0, 0.125, 0.375])
def test_issue_slots_are_384_and_512_if_all_are_polynomials(share):
    assert roofline.issue_cycles(B200, share) == 384 + 512 * share


def test_an_eighth_of_polynomials_leaves_small_heads_bound_by_exponentials():
    assert forward(B200, (64, 64), 1 / 8).exp2 == 896
    assert forward(B200, (64, 64), 1 / 8).efficiency == pytest.approx(0.57, abs=0.005)


def test_two_ctas_share_keys_and_values():
    assert forward(B200, (128, 128), ctas=2).smem == 256 + 128 + 128


def test_two_query_tiles_share_what_tma_writes():
    assert roofline.fill_cycles((128, 128), sharing=2) == 256


def test_hopper_reads_keys_and_values_for_every_64_rows():
    assert forward(H100, (128, 128)).smem == 256 + 2 * 512
    assert forward(H100, (128, 128), q_in_registers=True).smem == 2 * 512


def test_what_is_not_staged_costs_no_shared_memory():
    full, bare = backward(B200, (128, 128)), backward(B200, (128, 128), staged=())
    # dS written and read; dQ, in float32, too.
    assert full.smem - bare.smem == 256 + 256 + 512 + 512
    through = backward(B200, (128, 128), staged=("p", "ds", "dq"))
    assert through.smem - full.smem == 256 + 2 * 256


# ---------------------------------------------------------------------------------- GPUs


@pytest.mark.parametrize(
    "name, teraflops",
    [
        ("B200", 2250),
        ("GB200", 2500),
        ("B300", 2500),
        ("H100", 989.4),
        ("H200", 989.4),
        ("A100", 312),
        ("A10", 125),
        ("L4", 242 / 2),
        ("L40S", 362.05),
        ("RTX 3090", 71),
        ("RTX 4090", 165.2),
        ("RTX 5090", 838.4 / 4),
    ],
)
def test_peaks_are_those_of_the_data_sheets(name, teraflops):
    assert BY_NAME[name].peak_flops == pytest.approx(teraflops * 1e12, rel=2e-3)


def test_thor_has_an_eighth_of_its_sparse_4_bit_peak():
    """Half for density, a quarter for going from 4 bits over 8 to 16."""
    assert THOR.peak_flops == pytest.approx(2070e12 / 8, rel=5e-3)


def test_mma_sync_has_the_pace_of_an_a100_wherever_another_instruction_is_the_fast_one():
    """Assumed. Exponentials and pairs are those of the GPU itself."""
    for gpu in (B200, H200):
        slower = roofline.running(gpu, "mma.sync")
        assert slower.rates[:2] == BY_NAME["A100"].rates[:2]
        assert slower.rates[2:] == gpu.rates[2:] and "assumed" in slower.caveat
        assert slower.peak_flops < gpu.peak_flops
    assert roofline.running(B200, "tcgen05.mma") == B200
    assert roofline.running(BY_NAME["L4"], "mma.sync") == BY_NAME["L4"]


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="sm75.*sm100, sm103, sm110, sm120, sm80, sm86, sm90"):
        roofline.gpu_of("sm75")


# ---------------------------------------------------------------------- intensity


@pytest.mark.parametrize(
    "band, pairs",
    [
        ({}, 6 * 8),
        ({"is_causal": True}, 1 + 2 + 3 + 4 + 5 + 6),
        ({"is_causal": True, "alignment": "bottom_right"}, 3 + 4 + 5 + 6 + 7 + 8),
        ({"left": 1, "right": 0}, 1 + 2 + 2 + 2 + 2 + 2),
    ],
)
def test_visible_pairs(band, pairs):
    assert roofline.visible_pairs(problem(6, 8, **band)) == pairs


def test_forward_work_of_equal_lengths():
    """Per head 4 T S D operations; q, k, v, out and lse cross once."""
    found = work(problem(), "fwd", block=256)
    heads, length, d = 2 * 16, 4096, 128
    assert found.flops == heads * 4 * length * length * d
    assert found.hbm_bytes == heads * length * (4 * d * 2 + 4)
    assert found.intensity == pytest.approx(length / 2, rel=5e-3)


def test_backward_does_five_products():
    ours, forwards = work(problem(), "bwd", 128), work(problem(), "fwd", 128)
    assert ours.flops == forwards.flops * 5 / 2
    assert ours.intensity < forwards.intensity


def test_intensity_of_a_cta_is_that_of_its_rows_alone():
    """(products of Br rows with all keys) / (Br rows of q and out, all rows of k and v)."""
    rows, length, d = 64, 4096, 128
    found = work(problem(), "fwd", block=rows)
    bytes_moved = d * 2 * (rows + length) * 2 + rows * 4
    assert found.cta_intensity == pytest.approx(4 * rows * length * d / bytes_moved)


def test_grouped_heads_read_keys_once():
    grouped, own = work(problem(heads=(16, 2)), "fwd", 256), work(problem(), "fwd", 256)
    assert grouped.flops == own.flops
    assert grouped.intensity > 1.7 * own.intensity


def test_decoding_is_bound_by_memory_and_training_is_not():
    cycles = forward(H100, (128, 128))
    decoding = work(problem(q_len=1, kv_len=8192), "fwd", 128)
    assert attainable_flops(H100, cycles, decoding.intensity) < 0.01 * H100.peak_flops
    training = work(problem(), "fwd", 128)
    assert training.intensity > H100.ridge
    assert attainable_flops(H100, cycles, training.intensity) == H100.peak_flops


def test_cycles_name_their_bound():
    assert Cycles(10, 20, 5, 15).bound == "exp2"
    assert Cycles(10, 10, 5, 10).bound == "mma"
