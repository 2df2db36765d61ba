"""Segments that CTAs scan for: single faults of what they find, each of them noticed.

Not among them: elements that are counted beyond the last that is searched, which hides no pair and
shows none, but has more pairs compared.
"""

import pytest
from helpers.cases import BY_NAME, Case, documents, make
from helpers.oracle import assert_close, tolerance
from helpers.recording import build, needs_compiler, needs_dsl, prebuilt
from test_split_keys import run

from jax_fa.emulator.faults import UninitializedReadError
from jax_fa.spec.config import choose_forward
from jax_fa.spec.key import KernelKey

pytestmark = [
    needs_dsl,
    needs_compiler,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # of the DSL, within the DSL
]

KEY = KernelKey("sm_90a", "bfloat16", 64, 64, "general")
TWO = Case("two", q_len=300, kv_len=300, segments=(documents(100, 200), documents(200, 100)))
"""A tile of two runs, and one of a single run."""
WITHOUT_SECOND = (*[1] * 90, *[3] * 210)
THREE = Case("three", q_len=190, kv_len=300, segments=(documents(70, 60, 60), WITHOUT_SECOND))
"""A tile of three segments, one of which has no keys."""
RETURNING, BETWEEN = BY_NAME["segments_that_return"], BY_NAME["segments_between"]


def check(built, *cases):
    """Asserts that a kernel is right."""
    for case in cases:
        operands = make(case, KEY.dtype).operands
        got = run(built, operands, case.semantics, num_splits=1, seed=1)
        assert_close(got, tolerance(operands, case.semantics), KEY.dtype)


def a_third_segment_is_overlooked(segments):
    """The second is taken for the third."""
    right = segments.ids_of

    def wrong(*at):
        ids = right(*at)
        return ids._replace(kinds=segments.cutlass.min(ids.kinds, 2))

    return {"ids_of": wrong}


def segments_in_between_are_counted(segments):
    """Those of which the tile has no element."""
    right = segments._and

    def wrong(matches, at, segment, wanted):
        return right(matches, at, segment, wanted)._replace(number=matches.number + 1)

    return {"_and": wrong}


def gaps_are_overlooked(segments):
    """A segment that comes back is taken for a run."""
    return {"are_runs": lambda found: found[segments.KINDS] < segments.MANY}


def two_segments_are_taken_for_one(segments):
    """Blocks of the lower run are left unmasked."""
    right = segments.ids_of
    return {"ids_of": lambda *at: right(*at)._replace(kinds=segments.Int32(1))}


def runs_are_taken_for_each_other(segments):
    """The upper one is thought to be the lowest."""
    right = segments.scan

    def wrong(found, ids, searched, wanted, warps):
        right(found, ids, searched, wanted, warps)
        found[segments.LOWEST] = wanted.highest

    return {"scan": wrong}


def a_run_begins_an_element_late(segments):
    """Its first element is hidden."""
    right = segments.within_run

    def wrong(found, own, seen):
        seen = right(found, own, seen)
        return seen._replace(start=seen.start + segments.Int32(seen.start > 0))

    return {"within_run": wrong}


def a_run_ends_an_element_early(segments):
    """Its last element is hidden."""
    right = segments.within_run

    def wrong(found, own, seen):
        seen = right(found, own, seen)
        return seen._replace(end=seen.end - 1)

    return {"within_run": wrong}


def a_warp_finds_nothing(segments):
    """The elements that it looks at are left out."""
    right = segments.scan

    def wrong(found, ids, searched, wanted, warps):
        right(found, ids, searched._replace(start=searched.start + 32), wanted, warps)

    return {"scan": wrong}


def words_are_not_reset(segments):
    """What the words held before is taken for a result."""
    return {"reset": lambda found: None}


FAULTS = (
    (a_third_segment_is_overlooked, THREE, AssertionError),
    (segments_in_between_are_counted, BETWEEN, AssertionError),
    (gaps_are_overlooked, RETURNING, AssertionError),
    (two_segments_are_taken_for_one, TWO, AssertionError),
    (runs_are_taken_for_each_other, TWO, AssertionError),
    (a_run_begins_an_element_late, TWO, AssertionError),
    (a_run_ends_an_element_early, TWO, AssertionError),
    (a_warp_finds_nothing, TWO, AssertionError),
    (words_are_not_reset, TWO, (AssertionError, UninitializedReadError)),
)


def test_the_kernel_without_faults_passes(tmp_path):
    built = prebuilt(tmp_path, "sm90.fwd_sorted", KEY, choose_forward(KEY))
    check(built, TWO, THREE, RETURNING, BETWEEN)


@pytest.mark.parametrize(
    ("fault", "case", "error"), FAULTS, ids=[fault.__name__ for fault, *_ in FAULTS]
)
def test_a_fault_is_noticed(tmp_path, monkeypatch, fault, case, error):
    from jax_fa.kernels import segments

    for name, wrong in fault(segments).items():
        monkeypatch.setattr(segments, name, wrong)
    built = build(tmp_path, "sm90.fwd_sorted", KEY, choose_forward(KEY), fault.__name__)
    with pytest.raises(error):
        check(built, case)
