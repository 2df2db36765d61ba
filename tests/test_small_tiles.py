"""Where kernels with small tiles are chosen: as an H200 measured, and by arithmetic."""

from dataclasses import replace

import pytest

from jax_fa.spec import variants
from jax_fa.spec.arch import ARCHS, arch_named
from jax_fa.spec.band import Band
from jax_fa.spec.problem import Problem, Semantics

FULL, CAUSAL = Band(), Band(is_causal=True)


def window(left):
    return Band(is_causal=True, left=left)


# Sequences, tokens, band; us with small and with large tiles, 16 heads, bfloat16, H200: D = 64
# (kernels alone, at the profiler's clocks; with wait and lists as of November 2026), and D = 96
# (calls from Python; without 5 x 640, where large tiles were a sixth faster and are not chosen).
MEASURED = [
    (64, 128, FULL, 30.7, 36.1),
    (64, 128, CAUSAL, 31.2, 37.9),
    (64, 256, FULL, 74.8, 93.6),
    (64, 256, CAUSAL, 65.0, 95.5),
    (32, 384, FULL, 75.0, 65.4),
    (32, 512, FULL, 122.5, 115.6),
    (32, 512, CAUSAL, 87.4, 101.3),
    (16, 1024, FULL, 212.6, 205.2),
    (16, 1024, CAUSAL, 132.4, 155.9),
    (117, 64, FULL, 53.4, 62.3),
    (2, 256, FULL, 10.2, 11.5),
    (1, 8192, CAUSAL, 378.1, 344.5),
    (1, 16384, window(128), 129.3, 131.8),
    (1, 16384, window(512), 195.2, 200.1),
    (1, 16384, window(1024), 274.1, 269.2),
    (4, 640, FULL, 33.1, 29.3),
    (32, 640, FULL, 177.5, 183.4),
    (32, 768, CAUSAL, 160.0, 165.6),
    (2, 16384, FULL, 5607.2, 4882.1),
]
MEASURED_96 = [
    (64, 128, FULL, 42.2, 50.2),
    (64, 128, CAUSAL, 37.4, 47.8),
    (32, 512, FULL, 122.0, 133.5),
    (32, 512, CAUSAL, 90.6, 109.4),
    (16, 1024, FULL, 211.5, 234.4),
    (16, 1024, CAUSAL, 135.9, 162.1),
    (8, 2048, FULL, 389.9, 387.7),
    (8, 2048, CAUSAL, 224.7, 235.1),
    (4, 4096, FULL, 746.7, 721.6),
    (4, 4096, CAUSAL, 406.7, 409.1),
    (2, 8192, FULL, 1460.5, 1398.7),
    (2, 8192, CAUSAL, 760.6, 729.9),
    (2, 16384, FULL, 5801.6, 5384.4),
    (2, 16384, CAUSAL, 2938.1, 2789.4),
    (1, 16384, FULL, 2879.9, 2755.9),
    (1, 16384, CAUSAL, 1475.4, 1394.2),
]


def problem(batch, tokens, band=FULL, **fields):
    semantics = Semantics(scale=0.125, band=band)
    base = Problem("bfloat16", batch, batch, tokens, tokens, 16, 16, 64, 64, semantics)
    return replace(base, **fields)


@pytest.mark.parametrize(
    ("head_dim", "batch", "tokens", "band", "small", "large"),
    [(64, *row) for row in MEASURED] + [(96, *row) for row in MEASURED_96],
)
def test_the_faster_kernel_is_chosen(head_dim, batch, tokens, band, small, large):
    assert variants.small_tiles_pay(problem(batch, tokens, band), head_dim) == (small < large)


def test_every_size_with_small_tiles_says_what_large_ones_cost():
    assert set(variants.LARGE_COST) == {head_dim for head_dim, _ in variants.HEADS_OF_SMALL}


def test_names_tell_small_tiles_and_only_some_families_have_them():
    short = problem(64, 128)
    assert variants.find(short, arch_named("sm90")).name == "fwd_sm90_bf16_d64_full_small"
    for arch in ARCHS:
        small = [v for v in variants.of_families([arch.name]) if v.key.is_small]
        assert bool(small) == (arch.name == "sm90")
        assert variants.find(short, arch).key.is_small == bool(small)


@pytest.mark.parametrize(
    "fields", [{"head_dim": 128}, {"bias_bytes": 2}], ids=["a larger head", "a bias"]
)
def test_kernels_of_one_tile_size_serve_short_sequences_too(fields):
    assert not variants.find(problem(64, 128, **fields), arch_named("sm90")).key.is_small


def test_a_soft_cap_leaves_no_choice():
    asked = problem(64, 128)
    capped = replace(asked, semantics=replace(asked.semantics, soft_cap=20.0))
    assert variants.find(capped, arch_named("sm90")).name == "fwd_sm90_bf16_d64_general_cap"


def test_a_build_without_them_runs_the_others():
    held = {name for name, v in variants.BY_NAME.items() if not v.key.is_small}
    found = variants.find(problem(64, 128), arch_named("sm90"), compiled=held)
    assert found.name == "fwd_sm90_bf16_d64_full"


def test_packed_sequences_count_with_their_mean_length():
    present = ("cu_seqlens_q", "cu_seqlens_k")
    packed = problem(1, 8192, CAUSAL, present=present)
    assert variants.small_tiles_pay(replace(packed, num_sequences=33), 64)
    assert not variants.small_tiles_pay(replace(packed, num_sequences=1), 64)


def test_a_million_tokens_are_counted():
    assert not variants.small_tiles_pay(problem(1, 1 << 20, CAUSAL), 64)
    assert variants.small_tiles_pay(problem(1, 1 << 20, window(64)), 64)
