"""The benchmarks count, time and report what they say."""

import json
import random
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import (
    context,
    cpu,
    exchanges,
    gpu,
    graphs,
    implementations,
    kernel_times,
    launch,
    memory,
    pairs,
    report,
    sweep,
    timing,
    workloads,
)
from benchmarks.timing import Protocol, Samples
from benchmarks.workloads import MAIN, Workload

SMALL = Workload("small", 1, 64, 64, 2, 1, 16)


@pytest.mark.parametrize("window", [None, (5, 0), (3, 4)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(12, 12), (12, 7), (7, 12)])
def test_visible_pairs_are_those_of_the_mask(q_len, kv_len, is_causal, window):
    distance = np.arange(q_len)[:, None] - np.arange(kv_len)
    seen = distance >= (0 if is_causal else -kv_len)
    if window is not None:
        seen &= (distance <= window[0]) & (-distance <= window[1])
    workload = Workload("", 1, q_len, kv_len, 1, 1, 8, is_causal=is_causal, window=window)
    assert workload.visible_pairs() == seen.sum()


def test_documents_see_themselves_alone():
    whole = Workload("", 1, 64, 64, 1, 1, 8)
    packed = replace(whole, num_documents=4)
    assert packed.visible_pairs() == 4 * replace(whole, q_len=16, kv_len=16).visible_pairs()
    out = implementations.jax_fa_runner(packed, "float32", "forward")()
    alone = implementations.jax_fa_runner(whole, "float32", "forward")()
    np.testing.assert_allclose(out[:, :16], alone[:, :16], atol=1e-6)
    assert abs(out[:, 16:] - alone[:, 16:]).max() > 1e-3


def test_products_have_their_own_sizes():
    square = Workload("", 1, 64, 64, 1, 1, 16, is_causal=False)
    assert square.flops("forward+backward") == 7 * 2 * 64 * 64 * 16
    wide = replace(square, value_dim=48)
    assert wide.flops("forward") == 2 * square.flops("forward")  # 16 + 48
    assert wide.flops("backward") == 2 * 64 * 64 * (3 * 16 + 2 * 48)
    out, (dq, dk, dv) = implementations.jax_fa_runner(wide, "float32", "forward+backward")()
    assert [x.shape[-1] for x in (out, dq, dk, dv)] == [48, 16, 16, 48]


def test_goals_on_a_gpu_are_leads_over_flash_attention_4():
    ratios = gpu._fa4_ratios()
    assert ratios["d128_full_16384", "forward"] == pytest.approx(657 / 578)
    names = {w.name for w in (*workloads.GPU, *workloads.GPU_SIZES, *workloads.GPU_GROUPED)}
    assert {name for name, _ in ratios} <= names | {w.name for w in workloads.GPU_WINDOWED}
    workload = next(w for w in workloads.GPU if w.name == "d128_full_16384")
    for seconds, verdict in ((1.0, "met"), (1.03, "MISSED")):
        records = [
            report.Record(workload, "bfloat16", "forward", name, Samples((time,)))
            for name, time in ((report.SUBJECT, seconds), (gpu.PEER, 1.025 * 657 / 578))
        ]
        lead = next(line for line in gpu.goals(records, 1e15) if "lead" in line)
        assert lead.startswith(f"{verdict}: d128_full_16384, forward")


def test_start_up_and_calls_are_timed(capsys):
    assert launch.main([]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == [
        "empty call",
        "attention",
        "gradient",
    ]


def test_a_sweep_is_of_shapes_that_both_take_and_names_those_that_are_slower(tmp_path):
    source = random.Random(0)
    shapes = [sweep.shape(source, number) for number in range(400)]
    assert {x.name.split()[0] for x in shapes} == set(sweep.KINDS)
    assert {x.name.split()[-1] for x in shapes} == {"full", "causal", "window"}
    for x in shapes:
        assert x.num_q_heads % x.num_kv_heads == 0
        assert max(np.prod(shape) for shape in x.shapes().values()) <= 2**26
    records = [
        report.Record(x, "bfloat16", "forward", name, Samples((seconds,)))
        for number, x in enumerate(shapes[:8])
        for name, seconds in (("jax_fa", 2.0 if number == 3 else 0.5), ("cudnn", 1.0))
    ]
    lines = sweep.worst(records, 0.97)
    assert lines == [
        "forward: 8 shapes, 1.682 times cudnn in the geometric mean, 1 below 0.97",
        f"  0.50  {shapes[3].name}",
    ]
    report.write_json(records, {"gpu": "a GPU, 1 MHz", "date": "today"}, tmp_path / "sweep.json")
    again, about = sweep.stored(tmp_path / "sweep.json")
    assert again == records
    drawn = sweep.draw(again, about, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").exists() or "matplotlib" in drawn[0]


def test_exchanges_beside_kernels_are_counted(tmp_path):
    event = exchanges.Event
    events = [
        event(0, "copy", 0, 10),
        event(0, "exchange", 5, 30),
        event(0, "attention", 20, 60),
        event(0, "exchange", 50, 70),
        event(0, "exchange", 65, 80),
        event(0, "attention", 75, 100),
        event(1, "attention", 0, 40),
    ]
    assert exchanges.summary(events, 0) == exchanges.Summary(100, 35, 55, 10 + 10 + 5)
    assert exchanges.summary(events, 1) == exchanges.Summary(40, 0, 0, 0)
    names = ("ncclDevKernel_SendRecv", "MemcpyP2P", "kernel_cutlass_kernel", "loop_fusion")
    assert list(map(exchanges.kind_of, names)) == ["exchange", "exchange", "attention", "copy"]
    exchanges.draw(events, "two", tmp_path / "two.png")
    assert (tmp_path / "two.png").stat().st_size > 1000


def test_times_of_kernels_alone_are_those_that_ncu_tells():
    text = "  gpu__time_duration.sum   us   12.50\n  gpu__time_duration.sum   ms  1,000.25\n"
    assert kernel_times.durations(text) == [12.5, 1000250.0]
    number = len(kernel_times.POINTS)
    found = [[9.0, 5.0], [8.0, 7.0], [10.0, 4.0]] * number
    times = kernel_times.times_of([x for call in found for x in call], number)
    assert times == [kernel_times.Times(8.0, 14.0)] * number
    theirs = [kernel_times.Times(16.0, 7.0), *[kernel_times.Times(16.0, 28.0)] * (number - 1)]
    shown = kernel_times.table(kernel_times.POINTS, times, theirs)
    assert "| 64 | 32:32 | 512 | full | 8 / 14 | 16 / 7 | 2.00 / 0.50 |" in shown
    assert "D = 64, both: geometric mean 1.782, least 0.500" in shown
    assert shown.endswith("D = 128, both: geometric mean 2.000, least 2.000")
    with pytest.raises(SystemExit, match="not as many for each point"):
        kernel_times.times_of([1.0] * (3 * number + 1), number)


def test_the_calls_of_a_graph_are_as_many_as_are_counted(monkeypatch):
    """XLA makes one of equal calls."""
    monkeypatch.setattr(graphs, "TOKENS", 64)
    runs = graphs.runs_of_jax_fa(kernel_times.Point(8, heads=2, length=32, is_causal=True))
    outs: Any = runs.forward()
    gradients: Any = runs.both()
    assert {out.shape for out in outs} == {(2, 32, 2, 8)}
    for results in outs, [dq for dq, *_ in gradients]:
        assert len({np.asarray(x).tobytes() for x in results}) == graphs.CHAIN


def test_the_share_of_skipped_work_that_is_gained_is_that_of_the_pairs():
    whole = [kernel_times.Times(100.0, 400.0)] * 2
    assert kernel_times.WHOLE[0].pairs() == 16384 * 16385 // 2
    packed = [kernel_times.Times(60.0, 200.0)] * len(kernel_times.PACKED)
    shown = kernel_times.skipped(kernel_times.PACKED, packed, whole)
    # Half of the pairs are skipped, and 40 and 50 percent of the time are gained.
    assert "| 64 | 8192 | all of its document | 60 / 200 | 0.500 | 0.800 / 1.000 |" in shown
    point = kernel_times.WINDOWS[0]
    distance = np.arange(point.length)
    assert point.pairs() == np.minimum(distance + 1, point.window).sum()


def test_devices_that_share_sequences_are_timed_against_one(capsys, tmp_path):
    small = ["--lengths", "64", "--heads", "8", "8", "--head-dim", "8", "--rounds", "1"]
    output = tmp_path / "context.json"
    assert context.main([*small, "--strategies", "all_to_all", "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(row["candidate"], row["devices"]) for row in rows] == [
        ("one device", 1),
        ("all_to_all", 8),
    ] * 2
    assert capsys.readouterr().out.count("| all_to_all |") == 2


def test_biases_and_masks_are_timed_beside_each_other(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(pairs, "_PROTOCOL", Protocol(warmup=1, rounds=2))
    output = tmp_path / "pairs.json"
    assert pairs.main(["--shrink", "64", "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert len(rows) == len(pairs.BIASED) + 5
    assert all(len(row["both"]) == len(row["forward"]) for row in rows)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[4:]] == [row["name"] for row in rows]
    assert "function" in lines[-1]
    assert lines[-1].endswith(f"{float(lines[-1].split()[-2]):.2f} |")


def test_flops_count_two_products_forward_and_seven_with_the_backward():
    full = replace(SMALL, is_causal=False)
    assert full.flops("forward") == 4 * 2 * 64 * 64 * 16
    assert full.flops("forward+backward") == 14 * 2 * 64 * 64 * 16


def test_candidates_take_turns():
    calls = []
    candidates = {name: lambda name=name: calls.append(name) for name in "ab"}
    taken = timing.interleaved(candidates, Protocol(warmup=1, rounds=3))
    assert calls == ["a", "b", *"ababab"]
    assert [len(samples.seconds) for samples in taken.values()] == [3, 3]


def test_time_limit_ends_rounds_but_not_the_first():
    taken = timing.interleaved({"a": lambda: None}, Protocol(rounds=9, seconds=-1, min_rounds=2))
    assert len(taken["a"].seconds) == 2


def test_speedup_compares_within_rounds():
    # The machine was twice as slow in the second round, for both.
    assert Samples((1.0, 2.0)).speedup_over(Samples((3.0, 6.0))) == 3.0


@pytest.mark.parametrize("direction", workloads.DIRECTIONS)
def test_implementations_agree(direction):
    results = []
    for name, make in implementations.RUNNERS.items():
        if implementations.is_available(name, SMALL):
            out = make(SMALL, "float32", direction)()
            out = out if direction == "forward" else out[0]
            out = np.asarray(out if name != "torch" else out.detach().transpose(1, 2))
            results.append(out)
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], atol=1e-5)


def test_memory_of_an_unfused_implementation_is_that_of_its_scores():
    workload = Workload("", 1, 2048, 2048, 2, 2, 16)
    scores = 4 * 2 * 2048**2
    unfused = memory.peak_bytes("jax.nn xla", workload, "float32", "forward")
    fused = memory.peak_bytes("jax_fa", workload, "float32", "forward")
    assert unfused is not None and fused is not None
    assert unfused >= scores > 2 * fused


def test_memory_that_xla_plans_is_that_of_the_scores():
    workload = Workload("", 1, 512, 512, 2, 2, 16)
    scores = 4 * 2 * 512**2
    case: tuple[str, workloads.Direction] = ("float32", "forward")
    unfused = implementations.jax_runner(jax.nn.dot_product_attention, workload, *case)
    fused = implementations.jax_fa_runner(workload, *case)
    assert unfused.temporary_bytes >= scores > 2 * fused.temporary_bytes


def test_command_writes_table_samples_plot_and_goals(tmp_path, monkeypatch, capsys):
    main = replace(SMALL, name=MAIN.name)
    monkeypatch.setattr(workloads, "MAIN", main)
    monkeypatch.setattr(workloads, "CPU", (main,))
    monkeypatch.setattr(workloads, "CPU_SCALING", (SMALL.with_length(128),))
    monkeypatch.setattr(memory, "peak_bytes", lambda *_: 65 * 2**20)
    arguments = ["--seconds", "0", "--dtypes", "float32", "--output", str(tmp_path)]
    assert cpu.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "MISSED: float32, forward: 65.0 MB above inputs and outputs (goal: 64)" in printed
    assert f"| {MAIN.name} | float32 | forward | {report.SUBJECT} |" in printed
    assert f"Drawn: {tmp_path / 'cpu.png'}" in printed
    assert (tmp_path / "cpu.png").read_bytes().startswith(b"\x89PNG")
    records = json.loads((tmp_path / "cpu.json").read_text())["records"]
    assert {r["workload"]["name"] for r in records} == {MAIN.name, "small_128"}
    assert all(len(r["samples"]["seconds"]) >= 3 for r in records)
