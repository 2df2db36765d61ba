"""Several processes, as on several hosts: the results of one, and an end when one of them fails."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import worker
from helpers.harness import ROOT

DEVICES = 4
"""Of all processes together."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def started(folder, count, *job):
    """Processes at work; none is left at the end."""
    port = free_port()
    flags = f"--xla_force_host_platform_device_count={DEVICES // count}"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": f"{flags} --xla_backend_optimization_level=0",
    }
    running = []
    try:
        for index in range(count):
            command = [sys.executable, worker.__file__, port, count, index, *job]
            with (folder / f"{count}_{index}").open("w") as output:
                running.append(
                    subprocess.Popen(
                        list(map(str, command)),
                        env=environment,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield running
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


def printed(folder, count):
    return [(folder / f"{count}_{index}").read_text() for index in range(count)]


def test_processes_give_what_one_gives_and_read_what_others_saved(tmp_path):
    alone = worker.train(None, 3)
    for count, steps, strategies in ((4, 2, ["all_to_all"]), (2, 3, ["all_gather", "ring"])):
        job = ("train", tmp_path / "saved", steps, *strategies)
        with started(tmp_path, count, *job) as running:
            status = [process.wait(timeout=300) for process in running]
        outputs = printed(tmp_path, count)
        assert status == [0] * count, "\n".join(outputs)
        for output in outputs:
            losses = json.loads(re.search("^LOSSES (.*)", output, re.MULTILINE)[1])
            np.testing.assert_allclose(losses, alone[:steps], rtol=1e-5)
    assert "after step 2" in outputs[0]


def test_the_example_of_the_documentation_runs(tmp_path):
    text = (ROOT / "docs" / "parallel.md").read_text()
    example = tmp_path / "example.py"
    example.write_text(re.search("```python\n(# example.py.*?)```", text, re.DOTALL)[1])
    with started(tmp_path, 2, "script", example) as running:
        assert [process.wait(timeout=120) for process in running] == [0, 0], printed(tmp_path, 2)
    losses = [re.search("process . of 2: loss (.*)", x)[1] for x in printed(tmp_path, 2)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("victim", "how", "error"),
    [
        (0, "SIGKILL", "Gloo .* failed|service detected fatal errors"),
        (1, "SIGKILL", "Gloo .* failed|service detected fatal errors"),
        (1, "SIGSTOP", "stopped sending heartbeats"),
    ],
    ids=["coordinator", "other", "stopped"],
)
def test_the_others_end_with_an_error_when_a_process_does_not_go_on(tmp_path, victim, how, error):
    """A closed connection is an error at once; silence is one after the heartbeat's time."""
    with started(tmp_path, 2, "fall", victim, how) as running:
        if how == "SIGKILL":
            assert running[victim].wait(timeout=120) == -signal.SIGKILL
        status = running[1 - victim].wait(timeout=120)
    assert status not in (0, -signal.SIGKILL)
    output = printed(tmp_path, 2)[1 - victim]
    assert re.search(error, output), output
