"""``python -m jax_fa.check``: it passes what is right, notices what is not, and counts FLOPs."""

import re

import jax.numpy as jnp
import pytest

import jax_fa
from jax_fa import check
from jax_fa.analysis import roofline
from jax_fa.check import Finding, Shape
from jax_fa.runtime import bindings

KERNELS = {"fwd_sm80_bf16_d64_causal", "bwd_sm80_bf16_d64_causal"}
SMALL = ["--batch", "1", "--q-len", "100", "--heads", "4:2", "--head-dim", "32:16", "--rounds", "1"]


@pytest.mark.parametrize("dtype", check.WIDER)
@pytest.mark.parametrize("more", [[], ["--causal", "--kv-len", "70"], ["--window", "20:3"]])
def test_kernels_of_this_machine_pass(dtype, more, capsys):
    assert check.main([*SMALL, "--dtype", dtype, *more]) == 0
    text = capsys.readouterr().out
    assert text.startswith("cpu: cpu (fwd_cpu): ")
    assert text.count(": ok\n") == len(check.NAMES)
    assert re.search(r"^forward and backward: [\d.e-]+ ms, [\d.e-]+ TFLOP/s$", text, re.M)


def test_rows_that_see_nothing_have_no_error(capsys):
    assert check.main([*SMALL, "--window", "5:-90", "--rounds", "0"]) == 0
    assert "TFLOP/s" not in capsys.readouterr().out


@pytest.mark.parametrize("fault", [1.02, jnp.nan])
def test_a_wrong_result_is_told(fault, monkeypatch, capsys):
    def attend(*qkv, implementation, real=jax_fa.attention_with_lse, **options):
        out, lse = real(*qkv, implementation=implementation, **options)
        return (out if implementation == "xla" else (out * fault).astype(out.dtype)), lse

    monkeypatch.setattr(jax_fa, "attention_with_lse", attend)
    assert check.main([*SMALL, "--rounds", "0"]) == 1
    lines = capsys.readouterr().out.splitlines()
    wrong = [line.split()[0] for line in lines if line.endswith("WRONG")]
    assert wrong == ["out", "dq", "dk", "dv"]


def test_a_refusal_is_one_sentence():
    with pytest.raises(SystemExit, match="implementation='flash' is unknown; use None or one of"):
        check.main([*SMALL, "--implementation", "flash"])
    with pytest.raises(SystemExit, match="emulation: arch is 'sm70'; kernels exist for sm90"):
        check.main([*SMALL, "--emulate", "sm70"])


@pytest.mark.skipif(not KERNELS <= bindings.compiled(), reason="this build lacks the kernels")
def test_kernels_of_a_gpu_pass_in_the_emulator(capsys):
    assert check.main([*SMALL, "--emulate", "sm80", "--causal"]) == 0
    text = capsys.readouterr().out
    assert "fwd_sm80_bf16_d64_causal" in text and "TFLOP/s" not in text


def test_errors_are_judged_by_those_of_rounding():
    assert Finding("out", 2e-3, 1e-3).is_right
    assert not Finding("out", 2.1e-3, 1e-3).is_right
    assert Finding("lse", 1e-6, 0.0).is_right
    assert not Finding("lse", float("nan"), 1.0).is_right


@pytest.mark.parametrize(
    ("is_causal", "window", "pairs"),
    [
        (False, (None, None), 5 * 7),
        (True, (None, None), 1 + 2 + 3 + 4 + 5),
        (True, (1, None), 1 + 2 + 2 + 2 + 2),
        (False, (0, 3), 4 + 4 + 4 + 4 + 3),
    ],
)
def test_products_over_visible_pairs_count(is_causal, window, pairs):
    shape = Shape(2, 5, 7, (4, 2), (32, 16), "bfloat16", is_causal, window)
    qkv, _ = check.drawn(shape, 0)
    problem = jax_fa.explain(*qkv, **shape.options).problem
    assert roofline.visible_pairs(problem) == pairs
    assert check.flops(problem, has_backward=False) == 2 * 2 * 4 * pairs * (32 + 16)
    assert check.flops(problem, has_backward=True) == 2 * 2 * 4 * pairs * (4 * 32 + 3 * 16)
