"""The kernels' README shows what commands print; run as a script, this file renews it."""

import importlib
import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from jax_fa.analysis import timeline
from jax_fa.analysis.roofline import gpu_of
from jax_fa.kernels.sm100 import plan
from jax_fa.spec.config import choose_forward
from jax_fa.spec.key import KernelKey

PATH = Path(__file__).parents[2] / "jax_fa" / "kernels" / "README.md"
BLOCK = re.compile(r"(<!-- python -m ([\w.]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
KEY = KernelKey("sm_100f", "bfloat16", 128, 128, "full")
COSTS = timeline.durations(KEY, gpu_of("sm100"))


def updated(text):
    """The text with every block renewed."""

    def renewed(match):
        printed = io.StringIO()
        with redirect_stdout(printed):
            importlib.import_module(match[2]).main()
        return f"{match[1]}```\n{printed.getvalue().strip()}\n```\n{match[4]}"

    return BLOCK.sub(renewed, text)


def test_blocks_are_what_their_commands_print(monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv[:1])  # The commands read it; pytest's is another.
    text = PATH.read_text()
    assert [match[1] for match in BLOCK.findall(text)] == [
        "jax_fa.analysis.timeline",
        "jax_fa.analysis.plan_ledger",
        "jax_fa.analysis.backward_ledger",
    ]
    assert updated(text) == text, "run: python tests/kernels/test_kernels_readme.py"


def test_names_of_the_glossary_are_those_of_the_plan():
    made = plan.forward_plan(KEY, choose_forward(KEY))
    words = PATH.read_text().split("## Words")[1].split("## ")[0]
    here = {name for row in re.findall(r"^\|[^|]*\|([^|]*)\|", words, re.M)
            for name in re.findall(r"`(\w+)`", row)}  # fmt: skip
    names = {edge.data for edge in made.edges} | {role.name for role in made.roles}
    names |= {tmem.name for tmem in made.tmem} | {"stats", "shrink", "ctas", "polynomials"}
    names |= {"block_q", "block_kv", "MMA_ROWS", "q_tiles", "HANDED_OVER_FIRST", "RESCALE_LOG2"}
    assert here <= names, here - names


def test_files_it_names_exist():
    for name in re.findall(r"`((?:\.\./|sm\d+/)[\w./]+)`", PATH.read_text()):
        assert (PATH.parent / name).exists(), name


# ----------------------------------------------------------------------------- the model of time


def test_work_is_what_the_roofline_says_and_units_do_one_thing_at_a_time():
    spans = timeline.play(timeline.Design(rescales=True), COSTS, blocks=4)
    products = [span for span in spans if span.who == "mma"]
    assert sum(span.end - span.start for span in products) == 4 * 2 * 1024
    for one, other in zip(products, products[1:], strict=False):
        assert one.end <= other.start


def test_a_product_waits_for_what_it_reads():
    spans = timeline.play(timeline.Design(), COSTS, blocks=4)
    ends: dict[tuple[str, str], list[float]] = {}
    for span in spans:
        ends.setdefault((span.who, span.what), []).append(span.end)
    second_part = [span for span in spans if span.what == "PV1 rest"]
    last_chunks = sorted(ends["softmax1", "P1 rest"])[2::3]
    assert all(p <= pv.start for p, pv in zip(last_chunks, second_part, strict=True))


@pytest.mark.parametrize("query_tiles, buffers, share", [(1, 1, 0.6), (1, 2, 1.0), (2, 1, 1.0)])
def test_what_two_query_tiles_buy(query_tiles, buffers, share):
    design = timeline.Design(query_tiles, buffers)
    assert timeline.utilization(design, COSTS) == pytest.approx(share, abs=0.005)


def test_slower_hand_overs_never_help():
    for _, design in timeline.DESIGNS:
        shares = [
            timeline.utilization(timeline.replace(design, latency=latency), COSTS)
            for latency in timeline.LATENCIES
        ]
        assert shares == sorted(shares, reverse=True)


if __name__ == "__main__":
    PATH.write_text(updated(PATH.read_text()))
