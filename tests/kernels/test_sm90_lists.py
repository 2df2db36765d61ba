"""What find and load tell in the Hopper forward: single faults, each found under some schedule.

Not among them: a missing barrier of the lanes of a warp, which the emulator runs in step.
"""

import re
from dataclasses import replace

import pytest
from helpers.cases import BY_NAME, Case, Dense, make
from helpers.oracle import assert_close, tolerance
from helpers.recording import build, needs_compiler, needs_dsl, prebuilt
from test_split_keys import run

from jax_fa.emulator import EmulationError, Options
from jax_fa.emulator.faults import DeadlockError, UninitializedReadError
from jax_fa.spec.config import choose_forward
from jax_fa.spec.key import KernelKey

pytestmark = [
    needs_dsl,
    needs_compiler,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # of the DSL, within the DSL
]

KEY = KernelKey("sm_90a", "bfloat16", 64, 64, "general")
CASE = Case("lists", q_len=900, kv_len=500, heads=4, kv_heads=2, dense=Dense("blocks", "NTS"))
"""Ten tiles for each of two CTAs, whose lists differ: more than twice the lists of the ring."""
LONG = Case("long_list", 1, 30, 4300, heads=1, kv_heads=1, dense=Dense("blocks", "NTS"))
"""A list of 34 blocks, which two warps share."""
WINDOW = Case(
    "window", 1, 300, 300, heads=1, kv_heads=1, window=(90, 9), dense=Dense("random", "TS")
)
"""Blocks of which both the band and the mask hide pairs."""
SEGMENTS = BY_NAME["segments_of_many_tiles"]
FEW_KEYS = (*[9] * 32, *[5] * 32, *[9] * 32)
SPOT = Case("spot", q_len=900, kv_len=96, segments=((5,) * 900, FEW_KEYS))
"""Keys that only the second of the warps that find looks at."""
LOAD, FIND, CONSUME = 0, 1, 4
SCHEDULES = tuple(
    Options(completion, starved=starved, max_segments=400_000)
    for completion, starved in (
        ("lazy", CONSUME),
        ("eager", FIND + 1),
        ("random", None),
        ("eager", LOAD),
    )
)


CAUSAL = replace(KEY, mask="causal", is_small=True)
"""Find only takes tiles from their order, and output is stored while the next tile is computed."""
TILES = Case("tiles", q_len=900, kv_len=300, heads=4, kv_heads=2, is_causal=True)


def module_of(key):
    """The module of a variant."""
    return "sm90.fwd" if key == CAUSAL else "sm90.fwd_sorted"


def find_fault(built, case=CASE):
    """Runs a kernel under several schedules until one finds its fault, and raises that."""
    operands = make(case, KEY.dtype).operands
    wanted = tolerance(operands, case.semantics)
    for schedule in SCHEDULES:
        got = run(built, operands, case.semantics, num_splits=1, seed=1, options=schedule)
        assert_close(got, wanted, KEY.dtype)


def test_the_kernel_without_faults_passes(tmp_path):
    built = prebuilt(tmp_path, module_of(KEY), KEY, choose_forward(KEY))
    for case in (CASE, LONG, WINDOW):
        find_fault(built, case)


def test_the_causal_kernel_without_faults_passes(tmp_path):
    find_fault(prebuilt(tmp_path, module_of(CAUSAL), CAUSAL, choose_forward(CAUSAL)), TILES)


def nobody_waits_for_a_list(lists):
    """Roles read a list that is yet to be made."""
    return {"_wait": lambda ring, number: None}


def nobody_gives_a_list_back(lists):
    """Find waits for ever."""
    return {"_give_back": lambda ring, number: None}


def a_list_is_given_back_before_it_is_read(lists):
    """Find writes the list of a later tile over it."""
    right, give_back = lists._wait, lists._give_back

    def wrong(ring, number):
        right(ring, number)
        with lists.cute.arch.elect_one():
            give_back(ring, number)

    return {"_wait": wrong, "_give_back": lambda ring, number: None}


def find_does_not_wait_until_a_list_is_read(lists):
    """Find runs ahead of the ring."""
    return {"PipelineAsync.producer_acquire": lambda self, *_, **__: None}


def turns_of_the_ring_are_taken_for_each_other(lists):
    """The parity of the other turn."""
    right = lists.state_at

    def wrong(ring, number):
        return right(ring, number + ring.num_stages)

    return {"state_at": wrong}


def the_list_of_the_tile_before_is_read(lists):
    """One place back in the ring."""
    right = lists.on_list

    def wrong(variant, x, work):
        return right(variant, x, work._replace(tile=work.tile._replace(slot=work.tile.slot - 1)))

    return {"on_list": wrong}


def find_tells_of_another_head_of_keys(lists):
    """A word of what there is to do is that of another."""
    right = lists.work_on

    def wrong(variant, x, tile):
        work = right(variant, x, tile)
        return work._replace(tile=work.tile._replace(kv_head=work.tile.head))

    return {"work_on": wrong}


def a_block_less_is_counted(lists):
    """Load and consumers take one step too few."""
    right = lists.work_on

    def wrong(variant, x, tile):
        work = right(variant, x, tile)
        return work._replace(num_blocks=work.num_blocks - 1)

    return {"work_on": wrong}


def no_step_is_told(steps):
    """Consumers read a word that nobody has written."""
    return {"tell": lambda *at: steps.step_after(*at[:4]).block}


def no_step_is_told_to_hide_pairs(steps):
    """Consumers leave blocks unmasked that need it."""
    right = steps.next_hides_pairs
    return {"next_hides_pairs": lambda *at: right(*at) & False}


def a_step_is_told_under_the_number_of_the_next(steps):
    """Consumers read what follows the step before."""
    right = steps.tell
    return {
        "tell": lambda variant, x, work, block, number: right(variant, x, work, block, number + 1)
    }


def steps_have_half_the_slots(steps):
    """Load runs ahead of consumers by more steps than are kept."""
    return {"step_slots": lambda key, config: config.stages}


def a_step_is_told_after_its_loads(steps):
    """Consumers may find keys and values in place, and no word yet."""
    from jax_fa.kernels.sm90 import fwd_roles

    tell, load_v, late = steps.tell, fwd_roles.load_v, []

    def wrong_tell(*at):
        late.append(at)
        return steps.step_after(*at[:4]).block

    def wrong_load(*at):
        phase = load_v(*at)
        if late:
            tell(*late.pop())
        return phase

    return {"tell": wrong_tell, "load_v": wrong_load}


def queries_are_given_back_while_their_output_is_read(roles):
    """Nobody waits until TMA has read what it stores."""
    return {"release_q": lambda c, q_full: q_full.release()}


def queries_are_given_back_a_tile_early(roles):
    """Those of the tile whose output is to be written over them."""
    return {"release_stored": lambda c, stored, q_full: q_full.release()}


def no_queries_are_given_back(roles):
    """Load waits for ever."""
    return {"release_stored": lambda c, stored, q_full: None}


FAULTS = (
    (nobody_waits_for_a_list, UninitializedReadError),
    (nobody_gives_a_list_back, DeadlockError),
    (a_list_is_given_back_before_it_is_read, (AssertionError, EmulationError)),
    (find_does_not_wait_until_a_list_is_read, (AssertionError, EmulationError)),
    (turns_of_the_ring_are_taken_for_each_other, UninitializedReadError),
    (the_list_of_the_tile_before_is_read, (AssertionError, UninitializedReadError)),
    (find_tells_of_another_head_of_keys, AssertionError),
    (a_block_less_is_counted, AssertionError),
)
CAUSAL_FAULTS = (
    (nobody_waits_for_a_list, UninitializedReadError),
    (nobody_gives_a_list_back, DeadlockError),
    (find_does_not_wait_until_a_list_is_read, (AssertionError, EmulationError)),
    (turns_of_the_ring_are_taken_for_each_other, UninitializedReadError),
    (find_tells_of_another_head_of_keys, AssertionError),
    (a_block_less_is_counted, (AssertionError, DeadlockError)),
)
STORE_FAULTS = (
    (queries_are_given_back_while_their_output_is_read, (AssertionError, EmulationError)),
    (queries_are_given_back_a_tile_early, (AssertionError, EmulationError)),
    (no_queries_are_given_back, DeadlockError),
)
STEP_FAULTS = (
    (no_step_is_told, UninitializedReadError),
    (no_step_is_told_to_hide_pairs, AssertionError),
    (a_step_is_told_under_the_number_of_the_next, (AssertionError, UninitializedReadError)),
    (steps_have_half_the_slots, (AssertionError, EmulationError)),
    (a_step_is_told_after_its_loads, (AssertionError, UninitializedReadError)),
)


def each_of(faults):
    names = [fault.__name__ for fault, _ in faults]
    return pytest.mark.parametrize(("fault", "error"), faults, ids=names)


@each_of(FAULTS)
def test_a_fault_is_found(tmp_path, monkeypatch, fault, error):
    from jax_fa.kernels.sm90 import fwd_lists

    find_in_faulty(tmp_path, monkeypatch, fault, fwd_lists, error)


@each_of(STEP_FAULTS)
def test_a_fault_of_steps_is_found(tmp_path, monkeypatch, fault, error):
    from jax_fa.kernels.sm90 import fwd_steps

    find_in_faulty(tmp_path, monkeypatch, fault, fwd_steps, error)


@each_of(CAUSAL_FAULTS)
def test_a_fault_is_found_where_find_only_takes_tiles(tmp_path, monkeypatch, fault, error):
    from jax_fa.kernels.sm90 import fwd_lists

    find_in_faulty(tmp_path, monkeypatch, fault, fwd_lists, error, TILES, CAUSAL)


@each_of(STORE_FAULTS)
def test_a_fault_of_stores_is_found(tmp_path, monkeypatch, fault, error):
    from jax_fa.kernels.sm90 import fwd_roles

    find_in_faulty(tmp_path, monkeypatch, fault, fwd_roles, error, TILES, CAUSAL)


def find_in_faulty(tmp_path, monkeypatch, fault, home, error, case=CASE, key=KEY):
    """Compiles the kernel with what ``fault`` replaces in ``home`` and in those that import it."""
    from jax_fa.kernels.sm90 import fwd, fwd_roles

    for name, wrong in fault(home).items():
        kind, _, method = name.partition(".")
        if method:
            monkeypatch.setattr(getattr(home, kind), method, wrong)
            continue
        for module in (home, fwd_roles, fwd):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, wrong)
    built = build(tmp_path, module_of(key), key, choose_forward(key), fault.__name__)
    with pytest.raises(error):
        find_fault(built, case)


def test_blocks_that_a_mask_hides_are_masked_by_the_band_too(tmp_path, monkeypatch):
    from jax_fa.kernels.sm90 import fwd_roles

    def no_band(roles):
        return {"mask_by_place": lambda *_: None}

    find_in_faulty(tmp_path, monkeypatch, no_band, fwd_roles, AssertionError, WINDOW)


@pytest.mark.parametrize(("number", "case"), [(0, SEGMENTS), (1, SPOT), (1, LONG)], ids=str)
def test_finders_that_do_not_wait_for_each_other_are_found(tmp_path, number, case):
    """Words are reset before the first barrier, and must be written before the second."""
    built = prebuilt(tmp_path, module_of(KEY), KEY, choose_forward(KEY))
    barriers = list(re.finditer(r"bar(rier)?\.sync\s+\d+, 96;", built.ptx))
    assert len(barriers) == 2
    start, end = barriers[number].span()
    with pytest.raises((AssertionError, EmulationError, UninitializedReadError)):
        find_fault(built._replace(ptx=built.ptx[:start] + built.ptx[end:]), case)
