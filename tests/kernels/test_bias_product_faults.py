"""Single faults in Hopper's kernels that multiply a bias, and warps that lag behind."""

import dataclasses
from types import SimpleNamespace

import pytest
from helpers.cases import Case
from helpers.recording import build
from test_bias import CHOICES, KEY, MODULES, Biased, call, check, given_of, kernels, pytestmark
from test_bias_faults import chunks_are_of_the_first_head, kernel_modules

from jax_fa.emulator import EmulationError, Options

__all__ = ["kernels", "pytestmark"]

MULTIPLIED = {
    operation: dataclasses.replace(KEY, mask=mask, multiplies_bias=True)
    for operation, mask in {"fwd": "full", "bwd": "full", "dbias": "general"}.items()
}
LOADS_BIAS = {"fwd": 3, "bwd": 2, "dbias": 1}
"""The warp that loads the bias."""


def factors_are_too_large(kernels):
    """The bias counts double."""
    right = kernels.bias_product.factor_of
    return {"bias_product.factor_of": lambda bias: 2.0 * right(bias)}


def what_the_factor_loses_is_left_out(kernels):
    """The second product is that of the first chunk of factors with nothing."""
    right = kernels.bias_product.issue

    def wrong(mma, scores, slabs, factors, first):
        if first == 0:
            right(mma, scores, slabs, factors, first)

    return {"bias_product.issue": wrong}


def halves_of_a_block_change_places(kernels):
    """Each 64 columns of scores take the bias of the others."""
    right = kernels.bias_product.issue

    def wrong(mma, scores, slabs, factors, first):
        right(mma, scores, slabs[::-1], factors, first)

    return {"bias_product.issue": wrong}


def blocks_are_of_another_stage(kernels):
    """The other block of the ring is multiplied."""
    right = kernels.fwd_bias_product.chunk_of
    return {
        "fwd_bias_product.chunk_of": lambda variant, x, number, i: right(variant, x, number + 1, i)
    }


def nobody_waits_for_the_bias(kernels):
    """It is multiplied before it is there."""
    return {"fwd_bias_product.wait": lambda variant, x, number: None}


def odd_blocks_are_multiplied(kernels):
    """Nobody says that a block is odd."""
    no = kernels.bias.cutlass.Boolean(False)
    return {"bias_product.any_of_consumer": lambda *_: no}


def maxima_overlook_nan(kernels):
    """As in other kernels, whose scores have none."""
    return {"fwd_bias_product.highest_or_nan": kernels.fragment_softmax.row_max}


def maxima_are_hardly_ever_raised(kernels):
    """Powers overflow."""
    return {"fragment_softmax.RESCALE_LOG2": 1e4}


def the_accumulator_does_not_shrink(kernels):
    """It stays relative to the maxima before."""
    right = kernels.fwd_bias_product.to_probabilities
    return {"fwd_bias_product.to_probabilities": lambda *given: right(*given) & False}


def low_scores_are_not_odd(kernels):
    """The maximum is rounded by more than exponents have room for."""
    return {"bias_product.MOST": 2.0**60}


def odd_blocks_are_not_scored_again(kernels):
    """Elements are added to what is NaN."""
    return {"fwd_bias_product.multiply_anew": lambda variant, c, scored: None}


def odd_blocks_lack_their_bias(kernels):
    """Scores of Q and K alone."""
    names = ["fwd_bias_product.add_elements", "bwd_bias_product._add_elements"]
    return dict.fromkeys([*names, "dbias_product.add_elements"], lambda *_: None)


def oddness_is_told_too_late(kernels):
    """Warps read the word before all others may have written it."""
    right = kernels.primitives.meet

    def wrong(variant, name, further=0):
        if name not in ("out0", "odd0", "tile0") or not variant.key.multiplies_bias:
            right(variant, name, further)

    return {"primitives.meet": wrong}


def powers_tell_nothing(kernels):
    """Those of 2 and more, and NaN, are taken for right."""
    return {"bias_product.TWO": 0}


def powers_have_no_limit(kernels):
    """2 to the power of what rounding leaves."""
    return {"backward_rows.limit": lambda powers: None}


def only_nan_is_odd(kernels):
    """Powers of large sums are what rounding leaves, without a limit."""
    return {"dbias_product.softmax": SimpleNamespace(LOG2_E=2.0**-60)}


def only_last_rows_are_looked_at(kernels):
    """A thread's last pair of elements stands for all."""
    right = kernels.dbias_product.largest_of
    return {"dbias_product.largest_of": lambda words, dtype: right(words[-1:], dtype)}


def low_biases_are_not_odd(kernels):
    """The largest element counts, not the largest magnitude."""
    primitives, cute = kernels.primitives, kernels.bias.cute

    def wrong(words, dtype):
        largest = kernels.bias.cutlass.Float32(0.0)
        for word in words:
            for element in primitives.widen(word, dtype):
                largest = cute.arch.fmax(largest, element, nan=True)
        return largest

    return {"dbias_product.largest_of": wrong}


def half_of_the_columns_are_left_out(kernels):
    """As if heads were narrow."""
    right, none = kernels.fragments.multiply_filled, kernels.bias.cutlass.Int32(0)
    wrong = lambda mma, acc, a, b, columns: right(mma, acc, a, b, none)  # noqa: E731
    return {"fragments.multiply_filled": wrong}


def chunks_are_of_the_first_tile(kernels):
    """The ring stands still."""
    right = kernels.dbias_product.multiply_bias

    def wrong(variant, x, c, scores, first):
        right(variant, x, c, scores, first * 0)

    return {"dbias_product.multiply_bias": wrong}


def oddness_outlasts_no_step(kernels):
    """The steps after an odd one have scores of Q and K alone."""
    return {"bwd_bias_product.add_elements": lambda variant, x, c, scored: None}


def stages_are_given_back_early(kernels):
    """The next bias but one arrives where dS still is."""
    right = kernels.bwd_bias_product.score

    def wrong(variant, x, c, q_full, ring):
        scored = right(variant, x, c, q_full, ring)
        scored.full.release()
        kept = SimpleNamespace(index=scored.full.index, release=lambda: None)
        return scored._replace(full=kept)

    return {"bwd_bias_product.score": wrong}


EXACT = Biased(Case("exact", batch=1, q_len=200, kv_len=272, heads=2))
INEXACT = Biased(Case("inexact", scale=32**-0.5, q_len=70, kv_len=136))
HIDDEN = Biased(Case("hidden", batch=1, q_len=200, kv_len=272, heads=2), hides=5)
LOW = Biased(Case("low", q_len=70, kv_len=136), hides=5, least=-1e13)
ONE_ROW = Biased(Case("one_row", batch=1, q_len=70, kv_len=136), hides=1e-9)
HIGH = Biased(Case("high", scale=0.1763, q_len=70, kv_len=136), hides=5, least=20.0)
RISING = Biased(Case("rising", batch=1, q_len=200, kv_len=272, heads=2, magnitude=300.0))
"""Maxima of blocks differ by more than exponents can."""
LONG = Biased(Case("long", batch=1, q_len=500, kv_len=136, heads=1, kv_heads=1))
SHARED = Biased(Case("shared", batch=3, q_len=300, kv_len=136, heads=2, kv_heads=1), "NTS")
# In base 2 the LSE of row 3 is rounded by 39,424 downwards, its logits are not.
LOWER = Biased(Case("lower", q_len=70, kv_len=136), hides=5, least=-1e12, silences=True)
LATE = [Options("lazy", starved=3), Options("random", starved=0), Options("eager", starved=9)]


@pytest.mark.parametrize("options", LATE, ids=lambda x: f"{x.completion}-{x.starved}")
@pytest.mark.parametrize("biased", [EXACT, HIDDEN, RISING], ids=str)
@pytest.mark.parametrize("operation", ["fwd", "bwd", "dbias"])
def test_products_need_no_warp_that_keeps_pace(kernels, operation, biased, options):
    given, key = given_of(biased), MULTIPLIED[operation]
    check(call(kernels(operation, key), operation, given, options=options), given)


FAULTS = [
    ("fwd", EXACT, factors_are_too_large),
    ("fwd", INEXACT, what_the_factor_loses_is_left_out),
    ("fwd", EXACT, halves_of_a_block_change_places),
    ("fwd", EXACT, blocks_are_of_another_stage),
    ("fwd", EXACT, nobody_waits_for_the_bias),
    ("fwd", EXACT, chunks_are_of_the_first_head),
    ("fwd", HIDDEN, odd_blocks_are_multiplied),
    ("fwd", HIDDEN, maxima_overlook_nan),
    ("fwd", LOW, low_scores_are_not_odd),
    ("fwd", HIDDEN, odd_blocks_are_not_scored_again),
    ("fwd", HIDDEN, odd_blocks_lack_their_bias),
    ("fwd", HIDDEN, oddness_is_told_too_late),
    ("fwd", EXACT, half_of_the_columns_are_left_out),
    ("fwd", RISING, maxima_are_hardly_ever_raised),
    ("fwd", RISING, the_accumulator_does_not_shrink),
    ("bwd", EXACT, factors_are_too_large),
    ("bwd", HIGH, what_the_factor_loses_is_left_out),
    ("bwd", EXACT, halves_of_a_block_change_places),
    ("bwd", LONG, stages_are_given_back_early),
    ("bwd", HIDDEN, odd_blocks_are_multiplied),
    ("bwd", HIDDEN, odd_blocks_lack_their_bias),
    ("bwd", HIDDEN, oddness_is_told_too_late),
    ("bwd", HIDDEN, oddness_outlasts_no_step),
    ("bwd", HIDDEN, powers_tell_nothing),
    ("bwd", LOWER, powers_have_no_limit),
    ("bwd", EXACT, half_of_the_columns_are_left_out),
    ("dbias", EXACT, factors_are_too_large),
    ("dbias", HIGH, what_the_factor_loses_is_left_out),
    ("dbias", EXACT, halves_of_a_block_change_places),
    ("dbias", SHARED, chunks_are_of_the_first_tile),
    ("dbias", HIDDEN, odd_blocks_are_multiplied),
    ("dbias", HIDDEN, odd_blocks_lack_their_bias),
    ("dbias", ONE_ROW, oddness_is_told_too_late),
    ("dbias", LOWER, powers_have_no_limit),
    ("dbias", LOWER, only_nan_is_odd),
    ("dbias", ONE_ROW, only_last_rows_are_looked_at),
    ("dbias", HIDDEN, low_biases_are_not_odd),
    ("dbias", EXACT, half_of_the_columns_are_left_out),
]


@pytest.mark.parametrize(
    ("operation", "biased", "fault"), FAULTS, ids=[f"{x[0]}-{x[2].__name__}" for x in FAULTS]
)
def test_a_fault_of_a_product_is_noticed(tmp_path, monkeypatch, operation, biased, fault):
    modules = kernel_modules()
    for place, wrong in fault(modules).items():
        home, name = place.split(".")
        monkeypatch.setattr(getattr(modules, home), name, wrong)
    key = MULTIPLIED[operation]
    built = build(tmp_path, MODULES[operation], key, CHOICES[operation](key), fault.__name__)
    options = Options("lazy", starved=LOADS_BIAS[operation])
    if fault is stages_are_given_back_early:
        options = Options("eager", starved=9)
    elif biased is ONE_ROW:
        options = Options("lazy", starved=4)  # the warp that reads the row
    given = given_of(biased)
    with pytest.raises((AssertionError, EmulationError)):
        check(call(built, operation, given, options=options), given)
