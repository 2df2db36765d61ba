"""The demo end to end on a tiny model, its checkpoints and its refusals."""

import re

import numpy as np
import pytest

import jax_fa
from jax_fa import demo, demo_data
from jax_fa.demo import Demo, RunConfig, main
from jax_fa.demo_checkpoint import Checkpoints
from jax_fa.demo_model import ModelConfig
from jax_fa.demo_training import TrainConfig

TINY_MODEL = ModelConfig(context=32, num_layers=1, d_model=16, num_heads=2, num_kv_heads=1)
TINY_TRAINING = TrainConfig(batch_size=2, warmup_steps=2, learning_rate=1e-2)
TINY = (
    "--context 32 --num-layers 1 --d-model 16 --num-heads 2 --num-kv-heads 1 "
    "--batch-size 2 --warmup-steps 2 --learning-rate 1e-2 --steps 4"
).split()


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("All work and no play makes Jack a dull boy. Übung macht den Meister.\n" * 40)
    return path


def test_run_trains_samples_plots_and_passes_its_check(tmp_path, capsys):
    assert main([*TINY, "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "Python's standard library" in printed
    assert "Check:     passed" in printed
    assert "Sample:" in printed
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_resumed_run_gives_the_losses_of_an_uninterrupted_one(tmp_path, text_file, capsys):
    text = demo_data.read(text_file, TINY_MODEL.context)

    def losses(steps, folder=None):
        run = Demo(TINY_MODEL, TINY_TRAINING, RunConfig(steps, checkpoint_every=2), text)
        if folder is None:
            return run.train()[1]
        with Checkpoints(tmp_path / folder, TINY_MODEL, TINY_TRAINING) as checkpoints:
            return run.train(checkpoints)[1]

    uninterrupted = losses(7)
    assert losses(3, "saved") == uninterrupted[:3]
    assert losses(7, "saved") == uninterrupted
    assert "after step 3" in capsys.readouterr().out
    assert losses(7, "saved") == uninterrupted  # nothing left to do

    other = ModelConfig(context=32, num_layers=2)
    with pytest.raises(ValueError, match="num_layers is 2 and was 1"):
        Checkpoints(tmp_path / "saved", other, TINY_TRAINING)


def test_failed_check_is_a_failed_run(tmp_path, text_file, monkeypatch, capsys):
    monkeypatch.setattr(Demo, "repeated_losses", lambda self, count: [0.0] * count)
    monkeypatch.setattr(demo, "sample", lambda *_: b"")
    assert main([*TINY, "--text", str(text_file), "--output", str(tmp_path)]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("repeated", "passes"), [([2.0, 1.00001], True), ([2.0, 1.1], False), ([np.nan], False)]
)
def test_check(repeated, passes):
    assert demo.check([2.0, 1.0, 0.5], repeated, 1e-3) == passes


def test_check_notices_attention_that_is_slightly_wrong(text_file, monkeypatch):
    text = demo_data.read(text_file, TINY_MODEL.context)
    run = Demo(TINY_MODEL, TINY_TRAINING, RunConfig(steps=6), text)
    correct = run.repeated_losses(6)
    right = jax_fa.attention
    monkeypatch.setattr(jax_fa, "attention", lambda q, k, v, **more: 0.98 * right(q, k, v, **more))
    tolerance = demo._CHECK_TOLERANCE["float32"]
    assert not demo.check(run.repeated_losses(6), correct, tolerance)


def test_batches_depend_on_seed_and_step_alone(text_file):
    text = demo_data.read(text_file, 32)
    first = text.batch(3, (2, 32), seed=0)
    assert first.shape == (2, 33)
    np.testing.assert_array_equal(first, text.batch(3, (2, 32), seed=0))
    assert (first != text.batch(4, (2, 32), seed=0)).any()
    assert (first != text.batch(3, (2, 32), seed=1)).any()
    assert len(text.training) + len(text.held_out) == len(text_file.read_bytes())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "missing.txt"], "missing.txt"),
        (["--context", "100000000"], "need 100000002 for --context"),
        (["--d-model", "100"], "d_model should be a multiple of 8"),
        (["--num-kv-heads", "3"], "num_heads should be a multiple of num_kv_heads"),
        (["--steps", "0"], "steps is 0; it should be at least 1"),
        (["--batch-size", "0"], "batch_size is 0; it should be at least 1"),
        (["--num-layers", "-1"], "num_layers is -1; it should be at least 1"),
        (["--implementation", "cuda"], "'cuda'"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_bad_options_end_with_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert re.search(message, capsys.readouterr().err)
