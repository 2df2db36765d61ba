"""Dense masks in kernels: single faults that the shared cases have to notice."""

from dataclasses import replace

import pytest
from helpers.cases import BY_NAME, Case, Dense, make
from helpers.oracle import assert_close, tolerance
from helpers.recording import build, needs_compiler, needs_dsl, prebuilt
from test_sm100_backward import call
from test_split_keys import run

from jax_fa.emulator.faults import OutOfBoundsError
from jax_fa.spec.config import choose_backward, choose_forward
from jax_fa.spec.key import KernelKey

pytestmark = [
    needs_dsl,
    needs_compiler,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # of the DSL, within the DSL
    pytest.mark.filterwarnings("default:This static loop"),  # likewise, of heads of 256
]

HOPPER = KernelKey("sm_90a", "bfloat16", 64, 64, "general")
BLACKWELL = replace(HOPPER, arch="sm_100f")
KEYS = {"sm90": HOPPER, "sm100": BLACKWELL, "mma_sync": replace(HOPPER, arch="sm_80")}
CHOICES = {"fwd": choose_forward, "bwd": choose_backward}
BY_HEAD = Case(
    "by_head", 2, q_len=90, kv_len=150, heads=6, kv_heads=2, dense=Dense("random", "BNTS")
)
WINDOW, BLOCKS = BY_NAME["mask_window"], BY_NAME["mask_blocks"]
BLOCK_MASK = BY_NAME["block_mask_of_TS"]
APART = BY_NAME["mask_segments_apart"]
HALVES = Case("halves", q_len=300, kv_len=200, heads=4, kv_heads=2, dense=Dense("halves", "NTS"))
"""Of two heads that share keys, one is shown to the first half of the rows, one to the second."""


MODULES = ("sm90.fwd_sorted", "sm90.bwd", "sm100.bwd", "mma_sync.fwd")


@pytest.fixture(scope="module")
def faultless(tmp_path_factory):
    """Kernels without a fault, by the name of their module."""
    return {name: prebuilt(tmp_path_factory.mktemp(name), name, *asked(name)) for name in MODULES}


def operation_of(module):
    """The family and the operation of a module."""
    family, name = module.split(".")
    return family, name.removesuffix("_sorted")


def asked(module):
    """The variant of a module, and its configuration."""
    family, operation = operation_of(module)
    return KEYS[family], CHOICES[operation](KEYS[family])


def check(module, built, case):
    """Asserts that a kernel is right in a case."""
    if module.endswith("bwd"):
        got, wanted, *_ = call(built, case)
        assert_close(got, wanted, "bfloat16")
        return
    operands = make(case, "bfloat16").operands
    got = run(built, operands, case.semantics, num_splits=1, seed=1)
    assert_close(got, tolerance(operands, case.semantics), "bfloat16")


def every_head_is_the_first(dense_mask, _):
    """A stride of 0 over heads."""
    right = dense_mask.of_head
    return {"of_head": lambda mask, batch, head: right(mask, batch, head * 0)}


def batches_are_a_head_apart(dense_mask, _):
    """The stride over batches is that over heads."""
    least = dense_mask.cutlass.min

    def wrong(mask, batch, head):
        return least(batch, mask.batch - 1) + least(head, mask.heads - 1)

    return {"of_head": wrong}


def rows_are_one_further(dense_mask, _):
    """The row below."""
    right = dense_mask.row_of
    return {"row_of": lambda mask, batch, head, row: right(mask, batch, head, row + 1)}


def words_are_one_further(dense_mask, _):
    """The next 32 keys."""
    right = dense_mask.word_of
    return {"word_of": lambda mask, row, number: right(mask, row, number + 1)}


def nothing_is_masked(dense_mask, _):
    """Blocks that show something pass for blocks that hide nothing."""
    return {"hides": lambda found, block: dense_mask.Boolean(False)}


def rows_of_the_map_are_one_further(dense_mask, _):
    """A tile further down."""
    right, stretch = dense_mask.look, dense_mask.Stretch

    def wrong(mask, heads, rows, keys, max_rows):
        return right(mask, heads, stretch(rows.start + 128, rows.end + 128), keys, max_rows)

    return {"look": wrong}


def cells_of_the_map_are_one_further(dense_mask, _):
    """A tile further to the right."""
    right, stretch = dense_mask.look, dense_mask.Stretch

    def wrong(mask, heads, rows, keys, max_rows):
        return right(mask, heads, rows, stretch(keys.start + 128, keys.end + 128), max_rows)

    return {"look": wrong}


def stripes_are_as_many_as_rows(dense_mask, _):
    """The map of a block mask is read as if it had a row for each of the words."""
    right = dense_mask.look

    def wrong(mask, *places):
        return right(mask._replace(stripes=mask.rows), *places)

    return {"look": wrong}


def a_row_of_words_is_one_query(dense_mask, _):
    """A row of a block mask is read as one query's."""
    right = dense_mask.row_of

    def wrong(mask, *place):
        return right(mask._replace(row_shift=mask.row_shift * 0), *place)

    return {"row_of": wrong}


def a_block_is_masked_if_the_one_above_is(dense_mask, _):
    """The answer is for the step before."""
    right = dense_mask.hides
    return {"hides": lambda found, block: right(found, block + 1)}


def a_block_is_left_out(dense_mask, _):
    """Below a block comes the one after the next."""
    right = dense_mask.last_shown
    return {"last_shown": lambda found, block: right(found, block - 1)}


def the_last_block_is_left_out(dense_mask, _):
    """One step too few."""
    right, most = dense_mask.count_shown, dense_mask.cutlass.max
    return {"count_shown": lambda found, start, end: most(right(found, start, end) - 1, 1)}


def one_head_stands_for_a_group(_, columns):
    """The rows that the other heads of a group show are left out."""
    return {"read_heads": lambda mask, heads: heads._replace(end=heads.first + 1)}


FAULTS = [
    ("sm90.fwd_sorted", BY_HEAD, every_head_is_the_first),
    ("sm90.fwd_sorted", BY_HEAD, batches_are_a_head_apart),
    ("sm90.fwd_sorted", BY_HEAD, words_are_one_further),
    ("sm90.fwd_sorted", WINDOW, nothing_is_masked),
    ("sm90.fwd_sorted", WINDOW, rows_of_the_map_are_one_further),
    ("sm90.fwd_sorted", BY_NAME["mask_causal"], a_block_is_masked_if_the_one_above_is),
    ("sm90.fwd_sorted", BLOCKS, a_block_is_left_out),
    ("sm90.fwd_sorted", BY_NAME["block_mask_head_dim_256"], a_row_of_words_is_one_query),
    ("sm90.fwd_sorted", BLOCK_MASK, stripes_are_as_many_as_rows),
    ("mma_sync.fwd", BY_NAME["mask_causal"], a_block_is_masked_if_the_one_above_is),
    ("sm90.bwd", BY_HEAD, rows_are_one_further),
    ("sm90.bwd", BLOCK_MASK, stripes_are_as_many_as_rows),
    ("sm100.bwd", BY_HEAD, words_are_one_further),
    ("sm100.bwd", WINDOW, cells_of_the_map_are_one_further),
    ("sm100.bwd", BLOCKS, the_last_block_is_left_out),
    ("sm100.bwd", HALVES, one_head_stands_for_a_group),
]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("case", [BY_HEAD, WINDOW, HALVES, BLOCKS, BLOCK_MASK, APART], ids=str)
def test_kernels_without_a_fault_are_right(faultless, module, case):
    check(module, faultless[module], case)


@pytest.mark.parametrize("module", ["sm90.fwd_sorted", "sm100.bwd"])
def test_a_bit_of_a_long_list_stands_for_several_blocks(tmp_path, monkeypatch, module):
    from jax_fa.kernels import dense_mask

    monkeypatch.setattr(dense_mask, "LIST_BLOCKS", 3)
    key, config = asked(module)
    built = build(tmp_path, module, key, config, "lists of 3 blocks")
    for case in (BLOCKS, WINDOW):
        check(module, built, case)


@pytest.mark.parametrize(
    ("module", "case", "fault"), FAULTS, ids=[f"{x[0]}-{x[2].__name__}" for x in FAULTS]
)
def test_a_fault_is_noticed(tmp_path, monkeypatch, module, case, fault):
    from jax_fa.kernels import dense_mask, dense_mask_columns

    for name, wrong in fault(dense_mask, dense_mask_columns).items():
        for home in (dense_mask, dense_mask_columns):
            if hasattr(home, name):
                monkeypatch.setattr(home, name, wrong)
    family, operation = operation_of(module)
    key = replace(KEYS[family], head_dim=case.head_dim, value_dim=case.out_dim)
    built = build(tmp_path, module, key, CHOICES[operation](key), fault.__name__)
    with pytest.raises(AssertionError, match="error"):
        check(module, built, case)


@pytest.mark.parametrize("module", ["mma_sync.fwd", "sm90.fwd_sorted", "sm90.bwd"])
def test_a_block_behind_all_others_is_not_looked_up(tmp_path, monkeypatch, module):
    """Without the bound, that of a tile which segments leave nothing to visit is."""
    from jax_fa.kernels import dense_mask

    monkeypatch.setattr(dense_mask, "LIST_BLOCKS", 1 << 30)
    key, config = asked(module)
    built = build(tmp_path, module, key, config, "no bound")
    with pytest.raises(OutOfBoundsError, match="beyond the CTA's"):
        check(module, built, APART)
