"""The demo end to end on a tiny model, its checkpoints and its refusals."""

import errno
import os
import re
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.harness import in_new_process

import jax_fa
from jax_fa.demo import data, program
from jax_fa.demo.checkpoint import CheckpointError, Checkpoints, _digests
from jax_fa.demo.meshes import MeshConfig
from jax_fa.demo.model import ModelConfig
from jax_fa.demo.program import Demo, RunConfig, main
from jax_fa.demo.training import TrainConfig, Trainer

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
    text = data.read(text_file, TINY_MODEL.context)

    def losses(steps, folder=None):
        run = Demo(TINY_MODEL, TINY_TRAINING, RunConfig(steps, checkpoint_every=2), text)
        if folder is None:
            return run.train()[1]
        with Checkpoints(tmp_path / folder, TINY_MODEL, TINY_TRAINING, text) as checkpoints:
            return run.train(checkpoints)[1]

    uninterrupted = losses(7)
    assert losses(3, "saved") == uninterrupted[:3]
    assert losses(7, "saved") == uninterrupted
    assert "after step 3" in capsys.readouterr().out
    assert losses(7, "saved") == uninterrupted  # nothing left to do

    other = ModelConfig(context=32, num_layers=2)
    with pytest.raises(CheckpointError, match="num_layers is 2 and was 1"):
        Checkpoints(tmp_path / "saved", other, TINY_TRAINING, text)


def test_devices_of_a_mesh_give_the_losses_of_one_and_read_checkpoints_of_another(
    tmp_path, text_file, capsys
):
    model = ModelConfig(context=32, num_layers=1, d_model=32, num_heads=4, num_kv_heads=2)
    training = TrainConfig(batch_size=4, warmup_steps=2, learning_rate=1e-2)
    text = data.read(text_file, model.context)

    def losses(steps, mesh):
        with Checkpoints(tmp_path / "saved", model, training, text) as checkpoints:
            return Demo(model, training, RunConfig(steps, mesh=mesh), text).train(checkpoints)[1]

    alone = Demo(model, training, RunConfig(4), text).train()[1]
    assert "each_device" not in capsys.readouterr().err
    np.testing.assert_allclose(losses(3, MeshConfig(2, 2, 2)), alone[:3], rtol=1e-5)
    assert re.search(r"each_device=[\d.]+k? tokens/s", capsys.readouterr().err)
    np.testing.assert_allclose(losses(4, MeshConfig(data=1, context=4)), alone, rtol=1e-5)
    assert "after step 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("pipe=2", "'pipe=2' is not understood. Give each of the axes data, model, context"),
        ("data=2,data=4", "'data=4' is not understood.* at most once"),
        ("data=0", "'data=0' is not understood.*such as data=2,model=2,context=2"),
        ("data", "'data' is not understood"),
        ("data=3", "batch_size is 8, which 3 .* data may be 1, 2, 4, 8; or make .* multiple of 3"),
        ("model=4", "num_kv_heads is 2, which 4 devices cannot share .* model may be 1, 2; or"),
        ("context=3", "context is 256, which 3 devices .* context may be 1, 2, 4, .*256; or make"),
        ("data=8,model=2", "takes 16 devices, .* started with 8 .cpu.*device_count=16 before JAX"),
    ],
)
def test_mesh_that_does_not_fit_is_refused_with_what_would_work(mesh, message, capsys):
    assert jax.device_count() == 8  # JAX has started
    with pytest.raises(SystemExit) as end:
        main(["--mesh", mesh])
    assert end.value.code == 2
    assert re.search(message, one_line(capsys))


def test_processes_whose_devices_a_mesh_would_leave_out_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        ValueError, match="takes 4 devices, .* 2 processes have 8. Give a mesh of 8"
    ):
        MeshConfig(data=4).make()


def test_mesh_makes_its_virtual_devices_before_jax_starts():
    code = """
from jax_fa.demo.meshes import MeshConfig
print(dict(MeshConfig.of("context=2,data=3").make().shape))
"""
    printed = in_new_process(code, XLA_FLAGS="")
    assert printed == "{'data': 3, 'model': 1, 'context': 2}\n"


class Counting:
    """A trainer that does nothing but count; Ctrl-C is pressed in the step ``interrupt``."""

    def __init__(self, interrupt=0):
        self.graph, self.state = nnx.split((nnx.Linear(8, 8, rngs=nnx.Rngs(0)),))
        self.steps, self.interrupt = 0, interrupt

    def step(self, state, windows):
        self.steps += 1
        if self.steps == self.interrupt:
            signal.raise_signal(signal.SIGINT)
        return state, float(self.steps)

    def make(self, *_):
        """Stands for ``make_trainer``."""
        return Trainer(self.graph, self.step), self.state


@pytest.fixture
def command(tmp_path, text_file):
    """Arguments of a tiny run with checkpoints."""
    folders = ["--output", str(tmp_path / "out"), "--checkpoint", str(tmp_path / "saved")]
    return [*TINY, "--text", str(text_file), *folders]


@pytest.fixture
def saved(tmp_path, text_file, command):
    """Folder of the latest checkpoint of that run, after step 3; there is one of step 2, too."""
    text, counting = data.read(text_file, TINY_MODEL.context), Counting()
    with Checkpoints(tmp_path / "saved", TINY_MODEL, TINY_TRAINING, text) as checkpoints:
        checkpoints.save(counting.state, [1.0, 2.0])
        checkpoints.save(counting.state, [1.0, 2.0, 3.0])
    return tmp_path / "saved" / "3"


def one_line(capsys):
    """The message on standard error, without the progress bar."""
    last = capsys.readouterr().err.split("\r")[-1]
    lines = [line for line in last.splitlines() if not line.startswith("Training:")]
    assert len(lines) == 1
    return lines[0]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def drop_a_loss(path):
    """Digests are right afterwards: this is what a faulty program would have saved."""
    path.write_text("[1.0, 2.0]")
    (path.parents[1] / "SHA256SUMS").write_text("\n".join(_digests(path.parents[1])))


@pytest.mark.parametrize(
    ("files", "damage", "message"),
    [
        ("state/d/*", lambda path: os.truncate(path, path.stat().st_size // 2), "state/d/.* not"),
        ("state/ocdbt.process_0/d/*", flip, "state/ocdbt.process_0/d/.* is not what was saved"),
        ("losses/metadata", lambda path: path.write_text("[1.0, 2.0, 4.0]"), "losses/metadata"),
        ("losses/metadata", drop_a_loss, "it holds 2 losses"),
        ("config/metadata", lambda path: path.unlink(), "config/metadata is not what was saved"),
        ("_CHECKPOINT_METADATA", lambda path: path.write_text(""), "_CHECKPOINT_METADATA is not"),
        ("SHA256SUMS", lambda path: path.write_text(""), "is not what was saved"),
        ("SHA256SUMS", lambda path: path.unlink(), "No such file"),
    ],
    ids="truncated flipped altered short missing emptied undigested unknown".split(),
)
def test_damaged_checkpoint_is_refused_in_one_line(saved, command, capsys, files, damage, message):
    for path in list(saved.glob(files)):
        damage(path)
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 2
    line = one_line(capsys)
    assert re.search(f"step 3 is damaged .*{message}.* Remove {saved}", line)
    shutil.rmtree(saved)
    text = data.read(Path(command[command.index("--text") + 1]), TINY_MODEL.context)
    with Checkpoints(saved.parent, TINY_MODEL, TINY_TRAINING, text) as checkpoints:
        assert checkpoints.restore(Counting().state)[1] == [1.0, 2.0]


def test_checkpoint_of_another_text_is_refused(saved, text_file, command, capsys):
    text_file.write_text(text_file.read_text().replace("dull", "dumb"))
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 2
    assert re.search("belongs to another run: text is sha256:.* and was sha256:", one_line(capsys))


def test_interrupted_run_is_saved_and_goes_on(command, monkeypatch, capsys):
    monkeypatch.setattr(program, "make_trainer", Counting(interrupt=3).make)
    handler = signal.getsignal(signal.SIGINT)
    assert main([*command, "--steps", "5"]) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    assert re.search("interrupted after step 3, which is saved; the same", one_line(capsys))
    going_on = Counting(interrupt=1)
    monkeypatch.setattr(program, "make_trainer", going_on.make)
    assert main([*command, "--steps", "5"]) == 130
    captured = capsys.readouterr()
    assert "Resuming:  after step 3" in captured.out
    assert "interrupted after step 4" in captured.err

    monkeypatch.setattr(program, "make_trainer", Counting(interrupt=2).make)
    assert main(command[: command.index("--checkpoint")]) == 130
    assert "after step 2, nothing is saved; --checkpoint DIR" in one_line(capsys)


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["before", "orbax", "digests"])
def test_full_disk_at_a_checkpoint_is_one_line(command, monkeypatch, capsys, where):
    import orbax.checkpoint as ocp

    save, write, usage = ocp.CheckpointManager.save, Path.write_text, shutil.disk_usage
    counting = Counting()
    faults = {
        "before": (
            shutil,
            "disk_usage",
            lambda path: usage(path)._replace(free=100 if counting.steps == 2 else 1 << 30),
        ),
        "orbax": (
            ocp.CheckpointManager,
            "save",
            lambda self, step, **more: full() if step == 2 else save(self, step, **more),
        ),
        "digests": (
            Path,
            "write_text",
            lambda self, text, *more: (
                full()
                if self.name == "SHA256SUMS" and counting.steps == 2
                else write(self, text, *more)
            ),
        ),
    }
    command = [*command, "--checkpoint-every", "1"]
    monkeypatch.setattr(program, "make_trainer", counting.make)
    with monkeypatch.context() as context:
        context.setattr(*faults[where])
        assert main(command) == 1
    assert re.search("step 2 was not saved .*No space left.* Make room", one_line(capsys))
    monkeypatch.setattr(program, "make_trainer", Counting(interrupt=1).make)
    assert main(command) == 130
    assert "after step 1" in capsys.readouterr().out


def test_full_disk_at_the_plot_is_one_line(command, monkeypatch, capsys):
    monkeypatch.setattr(Demo, "train", lambda self, checkpoints: (None, [1.0]))
    monkeypatch.setattr(Demo, "held_out_loss", lambda *_: 1.0)
    monkeypatch.setattr(Demo, "repeated_losses", lambda *_: [1.0])
    monkeypatch.setattr(program, "sample", lambda *_: b"")
    monkeypatch.setattr(program, "plot", full)
    assert main(command) == 1
    assert "No space left" in one_line(capsys)


@pytest.mark.parametrize("option", ["--output", "--checkpoint"])
def test_file_where_a_folder_should_be_is_refused_before_training(
    command, text_file, monkeypatch, capsys, option
):
    monkeypatch.setattr(Demo, "train", None)
    for path in (text_file, text_file / "below"):
        with pytest.raises(SystemExit) as end:
            main([*command, option, str(path)])
        assert end.value.code == 2
        assert re.search(f"{option}.*(exists|Not a directory)", one_line(capsys))


def test_failed_check_is_a_failed_run(tmp_path, text_file, monkeypatch, capsys):
    monkeypatch.setattr(Demo, "repeated_losses", lambda self, count: [0.0] * count)
    monkeypatch.setattr(program, "sample", lambda *_: b"")
    assert main([*TINY, "--text", str(text_file), "--output", str(tmp_path)]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("repeated", "passes"), [([2.0, 1.00001], True), ([2.0, 1.1], False), ([np.nan], False)]
)
def test_check(repeated, passes):
    assert program.check([2.0, 1.0, 0.5], repeated, 1e-3) == passes


def test_check_notices_attention_that_is_slightly_wrong(text_file, monkeypatch):
    text = data.read(text_file, TINY_MODEL.context)
    run = Demo(TINY_MODEL, TINY_TRAINING, RunConfig(steps=6), text)
    correct = run.repeated_losses(6)
    right = jax_fa.attention
    monkeypatch.setattr(jax_fa, "attention", lambda q, k, v, **more: 0.98 * right(q, k, v, **more))
    tolerance = program._CHECK_TOLERANCE["float32"]
    assert not program.check(run.repeated_losses(6), correct, tolerance)


def test_batches_depend_on_seed_and_step_alone(text_file):
    text = data.read(text_file, 32)
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
        (["--seed", "-1"], "seed is -1; it should be from 0 to 4294967295"),
        (["--seed", "4294967296"], "seed is 4294967296; it should be from 0"),
        (["--seed", "1.5"], "invalid int value"),
        (["--learning-rate", "nan"], "learning_rate is nan; it should be finite"),
        (["--weight-decay", "-1"], "weight_decay is -1.0; it should be finite and >= 0"),
        (["--implementation", "cuda"], "'cuda'"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_bad_options_end_with_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert re.search(message, capsys.readouterr().err)
