"""Gradients of every case and dtype against the oracle, and against finite differences."""

import pytest
from helpers.cases import CASES, DTYPES
from helpers.harness import computed, wanted
from helpers.oracle import assert_close

each_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.mark.parametrize("dtype", DTYPES)
@each_case
def test_gradients_keep_the_tolerance_rule(case, dtype):
    got = computed(case, dtype)
    assert (got.dsinks is not None) == case.has_sinks
    assert (got.dbias is not None) == (case.bias is not None)
    assert_close(got, wanted(case, dtype), dtype)
