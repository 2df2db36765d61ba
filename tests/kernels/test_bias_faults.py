"""Single faults in Hopper's kernels with a bias, and warps that lag behind (``test_bias.py``)."""

import dataclasses
import functools
import importlib
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.cases import Case, Dense, documents
from helpers.recording import build
from test_bias import CHOICES, KEY, MODULES, Biased, call, check, given_of, kernels, pytestmark

from jax_fa.emulator import EmulationError, Options
from jax_fa.spec.band import UNBOUNDED
from jax_fa.spec.config import choose_dbias
from jax_fa.spec.problem import Problem
from jax_fa.spec.variants import mask_class

__all__ = ["kernels", "pytestmark"]

SMALLER = {"batch": 2, "q_len": 150, "kv_len": 134, "heads": 2, "kv_heads": 1}
PLAIN = Biased(Case("plain", **SMALLER))
BY_ROW = Biased(Case("by_row", **SMALLER), "BNT", "float32")
BY_KEY = Biased(Case("by_key", **SMALLER | {"q_len": 210}), "BNS", "float32")
SHARED = Biased(Case("shared", batch=6, q_len=70, kv_len=62, heads=3, kv_heads=1), "TS")
CAPPED = Biased(Case("capped", soft_cap=2.0, **SMALLER), hides=3)
LEAST = Biased(Case("least", **SMALLER), "BNTS", "float32", 5, float(np.finfo("float32").min))
USED = Biased(Case("used", q_lengths=(150, 77), kv_lengths=(100, 134), **SMALLER))
ODD = Biased(Case("odd", q_len=70, kv_len=133))
READ_BY_TMA = Case("staged", q_len=150, kv_len=136, heads=2, kv_heads=1)
STAGED = Biased(READ_BY_TMA)
STAGED_FLOATS = Biased(READ_BY_TMA, "BNTS", "float32")
STAGED_ROW = Biased(READ_BY_TMA, "NS")
STAGED_SHARED = Biased(Case("shared", batch=8, q_len=70, kv_len=64), "TS")
SHARED_LENGTHS = Biased(
    Case("lengths", q_lengths=(150, 77), kv_lengths=(100, 134), **SMALLER), "NTS"
)
BAND = Biased(Case("band", window=(10, 0), q_len=70, kv_len=133))
SEGMENTED = Biased(
    Case("segmented", 1, 150, 270, segments=(documents(70, 80), documents(120, 140, -10)))
)
MASKED = Biased(Case("masked", 1, 150, 270, dense=Dense("window")))
# The product with log2(e) is rounded by 58,265 downwards, in the LSE, but not in the logits.
HUGE = Biased(Case("huge", q_len=90, kv_len=134, heads=2), "TS", "float32", 5, -1.5e12, True)


def probabilities_are_unbounded(kernels):
    """2 to the power of what rounding leaves."""
    return {"backward_rows.probability": lambda power: power}


def every_head_is_the_first(kernels):
    """A stride of 0 over heads."""
    right = kernels.bias.row_of
    return {"bias.row_of": lambda bias, batch, head, row: right(bias, batch, head * 0, row)}


def batches_are_a_head_apart(kernels):
    """The stride over batches is that over heads."""
    clamped = kernels.bias.clamped_row

    def wrong(bias, batch, head, row):
        least = kernels.bias.cutlass.min
        own = least(batch, bias.batch - 1) + least(head, bias.heads - 1)
        return own.to(kernels.bias.Int64) * bias.rows + clamped(bias, row)

    return {"bias.row_of": wrong}


def rows_are_one_further(kernels):
    """The row below."""
    right = kernels.bias.clamped_row
    return {"bias.clamped_row": lambda bias, position: right(bias, position + 1)}


def keys_are_two_further(kernels):
    """The second key to the right."""
    right, columns = kernels.bias.key_of, kernels.fragment_bias_columns.load_columns
    return {
        "bias.key_of": lambda bias, key: right(bias, key + 2),
        "fragment_bias_columns.load_columns": lambda w, b, h, row, key: columns(
            w, b, h, row, key + 2
        ),
    }


def chunks_are_counted_from_one(kernels):
    """Of each block the second chunk is taken for the first."""
    right = kernels.fwd_bias_roles.state_at
    return {"fwd_bias_roles.state_at": lambda ring, number: right(ring, number + 1)}


def rows_of_a_chunk_are_one_further(kernels):
    """The row below, and its swizzle."""
    right = kernels.bias_chunks.of_thread

    def wrong(x, c, stage):
        return right(x, c._replace(thread=c.thread + 4), stage)

    return {"bias_chunks.of_thread": wrong}


def chunks_are_not_swizzled(kernels):
    """Columns lie where they would without a swizzle."""
    right = kernels.bias_chunks.of_thread

    def wrong(x, c, stage):
        chunk = right(x, c, stage)
        return chunk._replace(start=chunk.start // 32 * 32)

    return {"bias_chunks.of_thread": wrong}


def chunks_are_of_the_first_head(kernels):
    """TMA reads another head."""
    right = kernels.fwd_bias_roles.copy_chunk

    def wrong(variant, x, work, number, place, slot):
        tile = work.tile._replace(head=work.tile.head * 0)
        right(variant, x, work._replace(tile=tile), number, place, slot)

    return {"fwd_bias_roles.copy_chunk": wrong}


def rows_lie_closer(kernels):
    """A wrong stride over rows."""
    right = kernels.bias.Bias.row_bytes.fget
    return {"bias.Bias.row_bytes": property(lambda bias: right(bias) - 8)}


def nothing_is_clamped(kernels):
    """Keys beyond the last are read."""
    return {"bias.key_of": lambda bias, key: key}


def a_cap_shows_what_is_hidden(kernels):
    """-inf becomes the cap's negative."""

    def wrong(bias, acc):
        kernels.softmax.cap(acc, 2.0 * kernels.softmax.LOG2_E / bias.soft_cap)

    return {"bias.cap": wrong}


def large_scores_overflow(kernels):
    """The maximum of a row is -inf in base 2."""
    right = kernels.fragment_softmax.update

    def wrong(acc, state, shrink, scale_log2, are_wide):
        return right(acc, state, shrink, scale_log2)

    return {"fragment_softmax.update": wrong}


def one_pair_stands_for_all(kernels):
    """Of the batches and heads that share a tile, one counts."""
    right, make = kernels.dbias_steps.tile_at, kernels.dbias_work.Range

    def wrong(variant, x, place):
        tile = right(variant, x, place)
        return tile._replace(pairs=make(tile.pairs.start, tile.pairs.start + 1))

    return {"dbias_steps.tile_at": wrong}


def one_block_stands_for_all(kernels):
    """Of the rows and keys that share a tile, the first block counts."""
    make = kernels.dbias_work.Range
    return {"dbias_work._swept": lambda block, *_: make(block, block + 1)}


def parts_are_not_summed(kernels):
    """The first part is the result."""
    right = kernels.dbias_host.merge_kernel
    return {
        "dbias_host.merge_kernel": lambda d, parts, n, elements: right(
            d, parts, n * 0 + 1, elements
        )
    }


def rows_are_not_summed(kernels):
    """The first row of a tile stands for all."""
    return {"dbias_rows.sum_rows": lambda *_: None}


def keys_are_not_summed(kernels):
    """The keys of a thread stand for all."""
    return {"fragment_softmax.quad_sum": lambda total: total}


def a_cap_has_no_slope(kernels):
    """dS is that of the capped sum."""
    right = kernels.dbias_rows.exponentiate
    return {"dbias_rows.exponentiate": lambda x, stats, s, _: right(x, stats, s, False)}


def unused_rows_count(kernels):
    """Rows beyond the sequence are added, whatever they hold."""
    right = kernels.dbias_roles.add_products
    return {"dbias_roles.add_products": lambda c, stats, s, dp, _: right(c, stats, s, dp, False)}


def a_pair_follows_itself(kernels):
    """All batches and heads that share a tile are the first."""
    return {"dbias_steps._next_pair": lambda x, tile, at: at}


def all_steps_are_alike(kernels):
    """Lengths and blocks of rows are those of the first batch, and the first."""
    return {"dbias_steps.are_alike": lambda x, tile: kernels.dbias_steps.Boolean(True)}


def all_rows_have_the_statistics_of_the_first(kernels):
    """A stride of 0."""
    right = kernels.dbias_steps.row_places
    return {"dbias_steps.row_places": lambda *args: [x * 0 for x in right(*args)]}


def rows_without_a_key_have_statistics(kernels):
    """Whatever they hold."""

    def wrong(work, row, lse):
        return work.span.first_row + row >= work.span.own_len

    return {"dbias_steps.is_unused": wrong}


def nothing_is_hidden(kernels):
    """No step says so."""
    wrong = kernels.dbias_steps.Boolean
    return {"dbias_steps.may_hide": lambda *_: wrong(False)}


def tiles_do_not_carry(kernels):
    """The next tile is in the same row of tiles."""
    make = kernels.dbias_work.Place

    def wrong(x, place, steps):
        return make(place.batch, place.head, place.row_block, place.key_block + 1, place.part)

    return {"dbias_steps.place_after": wrong}


def there_are_more_parts_than_scratch(kernels):
    """By one."""
    return {"dbias_work.balanced_parts": lambda number, pairs, most, num_sms: most + 1}


def chunks_are_counted_from_the_first_key(kernels):
    """Every tile has the bias of the first keys."""
    right = kernels.bias_chunks.views

    def wrong(described, smem, bias, rows, first_half=0):
        return right(described, smem, bias, rows, first_half * 0)

    return {"bias_chunks.views": wrong}


def a_ring_has_one_round(kernels):
    """The parity is always the first one's."""
    right = kernels.dbias_roles._chunk_state
    return {"dbias_roles._chunk_state": lambda v, stage, parity: right(v, stage, parity * 0)}


def sums_of_rows_are_rows(kernels):
    """Every tile is written row by row."""
    staged = kernels.bias_chunks.is_staged
    return {"dbias_roles.is_written_by_rows": lambda x: staged(x.scalars.bias)}


def rows_by_units_have_no_end(kernels):
    """Rows beyond the last are written."""
    right = kernels.bias_chunks.copy_rows

    def wrong(x, stage, row, units, target):
        right(x, stage, row, units, target._replace(num_rows=target.num_rows + 64))

    return {"bias_chunks.copy_rows": wrong}


def units_have_no_end(kernels):
    """Keys beyond the last are written."""
    right = kernels.bias_chunks.copy_rows

    def wrong(x, stage, row, units, target):
        right(x, stage, row, units, target._replace(size_bytes=target.size_bytes + 128))

    return {"bias_chunks.copy_rows": wrong}


def nobody_meets(kernels, left_out):
    right = kernels.primitives.meet

    def wrong(variant, name, further=0):
        if name != left_out:
            right(variant, name, further)

    return {"primitives.meet": wrong}


def nobody_waits_until_the_bias_is_read(kernels):
    """Sums of columns are written where another warp may still add the bias."""
    return nobody_meets(kernels, "read")


def nobody_waits_until_sums_are_read(kernels):
    """The next tile's bias is written where another warp may still read sums of columns."""
    return nobody_meets(kernels, "summed")


def rows_of_the_gradient_lie_closer(kernels):
    """A wrong stride over its rows, right over heads."""
    right = kernels.bwd_dbias.store_columns

    def wrong(dtype, dbias, head, row, key, ds):
        right(dtype, dbias._replace(keys=dbias.keys - 1), head, row, key, ds)

    return {"bwd_dbias.store_columns": wrong}


def its_heads_are_the_first(kernels):
    """All heads write in one place."""
    right = kernels.bwd_dbias.store

    def wrong(variant, x, c, work, at, ds):
        right(variant, x, c, work, at._replace(head=at.head * 0), ds)

    return {"bwd_dbias.store": wrong}


def it_is_transposed(kernels):
    """Rows are keys."""
    right = kernels.bwd_dbias.store_columns
    return {
        "bwd_dbias.store_columns": lambda dtype, d, head, row, key, ds: right(
            dtype, d, head, key, row, ds
        )
    }


def its_rows_have_no_end(kernels):
    """Rows behind the last are written."""
    left = kernels.bwd_dbias.rows_left
    return {"bwd_dbias.rows_left": lambda d, row, key: left(d._replace(rows=d.rows + 64), row, key)}


def its_keys_have_no_end(kernels):
    """Keys behind the last are written: those of the next row."""
    left = kernels.bwd_dbias.rows_left
    return {"bwd_dbias.rows_left": lambda d, row, key: left(d, row, key * 0)}


def it_has_other_elements(kernels):
    """The type of the queries instead of float32."""
    right = kernels.bwd_dbias.of_call
    return {"bwd_dbias.of_call": lambda x: right(x)._replace(size_bytes=kernels.bias.Int32(2))}


class Absent:
    """A pointer that is null."""

    @staticmethod
    def toint():
        return 0


def a_band_leaves_nothing_out(kernels):
    """Blocks beyond it are not cleared."""
    right = kernels.bwd_dbias.leaves_blocks_out

    def wrong(scalars):
        return right(scalars._replace(window_left=UNBOUNDED, window_right=UNBOUNDED))

    return {"bwd_dbias.leaves_blocks_out": wrong}


def lengths_leave_nothing_out(kernels):
    """Blocks beyond a sequence are not cleared."""
    right = kernels.bwd_dbias.leaves_blocks_out

    def wrong(scalars):
        lengths = kernels.tiles.Sides(Absent, Absent)
        return right(scalars._replace(sequences=scalars.sequences._replace(lengths=lengths)))

    return {"bwd_dbias.leaves_blocks_out": wrong}


def segments_leave_nothing_out(kernels):
    """Blocks of other segments are not cleared."""
    right = kernels.bwd_dbias.leaves_blocks_out
    return {
        "bwd_dbias.leaves_blocks_out": lambda scalars: right(scalars._replace(q_segments=Absent))
    }


def masks_leave_nothing_out(kernels):
    """Blocks that a mask hides are not cleared."""
    right = kernels.bwd_dbias.leaves_blocks_out

    def wrong(scalars):
        return right(scalars._replace(mask=scalars.mask._replace(words=Absent)))

    return {"bwd_dbias.leaves_blocks_out": wrong}


def the_end_is_not_cleared(kernels):
    """The last bytes, fewer than 16."""
    right = kernels.bwd_dbias.clear_kernel
    return {"bwd_dbias.clear_kernel": lambda address, size: right(address, size // 16 * 16)}


def chunks_lie_in_each_others_place(kernels):
    """The first keys of a tile have the bias of the last."""
    right = kernels.bwd_bias.chunk_of
    return {"bwd_bias.chunk_of": lambda variant, c, stage: right(variant, c, stage) ^ 1}


def halves_of_a_chunk_change_places(kernels):
    """The second stage of a step in float32 is read as the first."""
    right = kernels.bwd_bias.first_stage
    return {"bwd_bias.first_stage": lambda variant, at: right(variant, at) ^ 1}


def the_ring_stands_still(kernels):
    """Every step reads what the first one did."""
    return {"bwd_bias.first_stage": lambda variant, at: at.parity * 0}


def a_swizzle_is_off_by_one(kernels):
    """The units of a row are those of the next."""
    right = kernels.bwd_bias.place_of_float
    unit = kernels.bwd_bias.UNIT_WORDS
    return {"bwd_bias.place_of_float": lambda start, i: right(start ^ unit, i)}


def every_bias_is_staged(kernels):
    """TMA reads rows where there are none."""
    return {"bias_chunks.is_staged": lambda bias: bias.keys > 1}


def one_row_stands_for_none(kernels):
    """A bias of one row has a stride over rows."""
    right = kernels.bias_chunks.describe

    def wrong(bias, *rest, **further):
        return right(bias._replace(rows=bias.rows + 1), *rest, **further)

    return {"bias_chunks.describe": wrong}


def the_step_is_the_one_before(kernels):
    """Loads begin with the second step."""
    right = kernels.bwd_bias.first_step

    def wrong(work, parity):
        return right(work, parity)._replace(q_block=right(work, parity).q_block + work.stride)

    return {"bwd_bias.first_step": wrong}


def dbias_is_stored_before_it_is_written(kernels):
    """The parity is that of the other buffer."""
    right = kernels.bwd_dbias._store_halves

    def wrong(variant, x, work, at):
        right(variant, x, work, at._replace(parity=1 - at.parity))

    return {"bwd_dbias._store_halves": wrong}


def dbias_in_float32_is_the_bias(kernels):
    """dS is not put in its place."""
    return {"bwd_bias.keep_floats": lambda *_: None}


FAULTS = [
    ("fwd", PLAIN, every_head_is_the_first),
    ("fwd", PLAIN, batches_are_a_head_apart),
    ("fwd", PLAIN, rows_are_one_further),
    ("fwd", ODD, keys_are_two_further),
    ("fwd", STAGED, chunks_are_counted_from_one),
    ("fwd", STAGED, rows_of_a_chunk_are_one_further),
    ("fwd", STAGED_FLOATS, chunks_are_not_swizzled),
    ("fwd", STAGED_ROW, one_row_stands_for_none),
    ("fwd", STAGED, chunks_are_of_the_first_head),
    ("fwd", PLAIN, rows_lie_closer),
    ("fwd", ODD, nothing_is_clamped),
    ("fwd", CAPPED, a_cap_shows_what_is_hidden),
    ("fwd", LEAST, large_scores_overflow),
    ("bwd", PLAIN, every_head_is_the_first),
    ("bwd", PLAIN, rows_are_one_further),
    ("bwd", PLAIN, keys_are_two_further),
    ("bwd", ODD, nothing_is_clamped),
    ("bwd", CAPPED, a_cap_shows_what_is_hidden),
    ("bwd", HUGE, probabilities_are_unbounded),
    ("bwd", PLAIN, rows_of_the_gradient_lie_closer),
    ("bwd", PLAIN, its_heads_are_the_first),
    ("bwd", PLAIN, it_is_transposed),
    ("bwd", PLAIN, its_rows_have_no_end),
    ("bwd", PLAIN, its_keys_have_no_end),
    ("bwd", LEAST, it_has_other_elements),
    ("bwd", BAND, a_band_leaves_nothing_out),
    ("bwd", BAND, the_end_is_not_cleared),
    ("bwd", USED, lengths_leave_nothing_out),
    ("bwd", SEGMENTED, segments_leave_nothing_out),
    ("bwd", MASKED, masks_leave_nothing_out),
    ("bwd", STAGED, chunks_lie_in_each_others_place),
    ("bwd", STAGED, the_step_is_the_one_before),
    ("bwd", STAGED, rows_lie_closer),
    ("bwd", STAGED, dbias_is_stored_before_it_is_written),
    ("bwd", STAGED_FLOATS, halves_of_a_chunk_change_places),
    ("bwd", STAGED_FLOATS, the_ring_stands_still),
    ("bwd", STAGED_FLOATS, a_swizzle_is_off_by_one),
    ("bwd", STAGED_FLOATS, dbias_in_float32_is_the_bias),
    ("bwd", STAGED_ROW, one_row_stands_for_none),
    ("bwd", ODD, every_bias_is_staged),
    ("dbias", HUGE, probabilities_are_unbounded),
    ("dbias", PLAIN, every_head_is_the_first),
    ("dbias", SHARED, one_pair_stands_for_all),
    ("dbias", BY_KEY, one_block_stands_for_all),
    ("dbias", SHARED, parts_are_not_summed),
    ("dbias", BY_KEY, rows_are_not_summed),
    ("dbias", BY_ROW, keys_are_not_summed),
    ("dbias", CAPPED, a_cap_has_no_slope),
    ("dbias", USED, unused_rows_count),
    ("dbias", SHARED, a_pair_follows_itself),
    ("dbias", SHARED_LENGTHS, all_steps_are_alike),
    ("dbias", BY_KEY, all_steps_are_alike),
    ("dbias", PLAIN, all_rows_have_the_statistics_of_the_first),
    ("dbias", LEAST, rows_without_a_key_have_statistics),
    ("dbias", BAND, nothing_is_hidden),
    ("dbias", PLAIN, tiles_do_not_carry),
    ("dbias", SHARED, there_are_more_parts_than_scratch),
    ("dbias", ODD, every_bias_is_staged),
    ("dbias", STAGED, chunks_are_counted_from_the_first_key),
    ("dbias", STAGED, rows_of_a_chunk_are_one_further),
    ("dbias", STAGED, chunks_are_not_swizzled),
    ("dbias", STAGED, a_ring_has_one_round),
    ("dbias", STAGED_ROW, sums_of_rows_are_rows),
    ("dbias", STAGED_SHARED, sums_of_rows_are_rows),
    ("dbias", STAGED, rows_by_units_have_no_end),
    ("dbias", STAGED, units_have_no_end),
]


def key_of(operation, given):
    """A kernel that masks no more than a case asks for, which takes less time to compile.

    Of the gradient alone it would take as long.
    """
    if operation == "dbias" or given.biased.hides:
        return KEY
    without_bias = Problem.of(given.data.operands, given.semantics)
    return dataclasses.replace(KEY, mask=mask_class(without_bias))


@pytest.mark.parametrize("operation", ["fwd", "bwd", "dbias"])
@pytest.mark.parametrize("biased", sorted({x[1] for x in FAULTS}, key=str), ids=str)
def test_kernels_without_a_fault_are_right(kernels, operation, biased):
    given = given_of(biased)
    for key in {KEY, key_of(operation, given)}:  # the wheel's, and that which faults are put in
        check(call(kernels(operation, key), operation, given), given)


def kernel_modules():
    """Modules of the kernels, by their last names."""
    names = ["bias", "softmax", "fragment_softmax", "fragment_bias_columns"]
    names += ["dbias_host", "dbias_rows", "dbias_work", "backward_rows", "sm90.dbias_roles"]
    names += ["sm90.dbias_steps", "primitives"]
    names += ["sm90.bwd_dbias", "sm90.bwd_bias", "sm90.bias_chunks", "sm90.fwd_bias_roles", "tiles"]
    names += ["sm90.fwd_bias_product", "sm90.bwd_bias_product", "sm90.bias_product"]
    names += ["sm90.dbias_product", "fragments"]
    found = {x.split(".")[-1]: importlib.import_module(f"jax_fa.kernels.{x}") for x in names}
    return SimpleNamespace(**found)


# A warp each of load, load_bias and both parts of find, and of either consumer.
LAGGING = [
    Options(completion, starved=warp)
    for completion, warp in zip(["lazy", "eager", "random"] * 2, (0, 1, 2, 3, 4, 9), strict=True)
]


@pytest.mark.parametrize("options", LAGGING, ids=lambda x: f"{x.completion}-{x.starved}")
@pytest.mark.parametrize(
    "biased", [USED, STAGED, STAGED_FLOATS, STAGED_ROW, STAGED_SHARED, ODD], ids=str
)
def test_gradients_of_a_bias_need_no_warp_that_keeps_pace(kernels, biased, options):
    given = given_of(biased)
    check(call(kernels("dbias"), "dbias", given, options=options), given)


@pytest.mark.parametrize(
    ("fault", "biased"),
    [
        (nobody_waits_until_the_bias_is_read, STAGED_ROW),
        (nobody_waits_until_sums_are_read, BY_KEY),
    ],
)
def test_a_fault_is_noticed_if_a_warp_lags(tmp_path, monkeypatch, fault, biased):
    modules, options = kernel_modules(), Options(starved=4)
    (wrong,) = fault(modules).values()
    monkeypatch.setattr(modules.primitives, "meet", wrong)
    built = build(tmp_path, MODULES["dbias"], KEY, choose_dbias(KEY), fault.__name__)
    given = given_of(biased)
    with pytest.raises((AssertionError, EmulationError)):
        check(call(built, "dbias", given, options=options), given)


@pytest.mark.parametrize("head_dim", [96, 128, 192, 256])
def test_gradients_of_a_bias_of_larger_heads_are_right(kernels, head_dim):
    """Their rings hold fewer chunks and steps."""
    value_dim = min(head_dim, 128) if head_dim == 192 else head_dim
    key = dataclasses.replace(KEY, head_dim=head_dim, value_dim=value_dim)
    sizes = {"head_dim": head_dim, "value_dim": value_dim, "batch": 2, "heads": 2, "kv_heads": 1}
    for kv_len, dims in ((133, "NTS"), (136, "TS"), (136, "NTS"), (136, "NS")):
        for dtype in (None, "float32"):
            case = Case("larger", q_len=150, kv_len=kv_len, is_causal=True, **sizes)
            given = given_of(Biased(case, dims, dtype))
            check(call(kernels("dbias", key), "dbias", given), given)


@pytest.mark.parametrize(
    ("operation", "biased", "fault"), FAULTS, ids=[f"{x[0]}-{x[2].__name__}-{x[1]}" for x in FAULTS]
)
def test_a_fault_is_noticed(tmp_path, monkeypatch, operation, biased, fault):
    modules = kernel_modules()
    for place, wrong in fault(modules).items():
        *path, name = place.split(".")
        home = functools.reduce(getattr, path, modules)
        monkeypatch.setattr(home, name, wrong)
    given = given_of(biased)
    key = key_of(operation, given)
    built = build(tmp_path, MODULES[operation], key, CHOICES[operation](key), fault.__name__)
    with pytest.raises((AssertionError, EmulationError)):
        check(call(built, operation, given), given)
