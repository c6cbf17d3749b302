"""Processes that are killed while saving, and runs that go on with another number of devices."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(script, *args, devices=1):
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, str(HERE / script), *map(str, args)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_killed_while_saving_loses_nothing_committed(make, toy, same):
    stages = [
        ("before write", 2),
        ("write started", 2),
        ("waiting", 3),
        ("written", 3),
        ("before commit", 3),
        ("half deleted", 2),
        ("durable", 2),
    ]
    committed = 0
    for stage, count in stages:
        child = run("child.py", make.directory, stage, count)
        assert child.returncode == -signal.SIGKILL, child.stderr
        announced = [int(line.split()[1]) for line in child.stdout.splitlines()]
        with make() as checkpointer:
            state, step = checkpointer.restore_or_init(toy.abstract(), toy.init)
        assert step >= max([committed, *announced]), stage
        same(state, toy.after(step))
        committed = step
        assert all(path.name.isdecimal() for path in make.directory.iterdir()), stage
        assert len(list(make.directory.iterdir())) <= 3, stage
    assert not make.lines
    assert committed > 0


def test_saved_on_8_devices_restored_on_1_2_4_and_8_under_other_meshes(tmp_path):
    child = run("reshard.py", "save", tmp_path, devices=8)
    assert (child.returncode, child.stdout) == (0, ""), child.stderr
    for devices in (1, 2, 4, 8):
        child = run("reshard.py", "restore", tmp_path, devices=devices)
        assert (child.returncode, child.stdout) == (0, "same\n"), child.stderr
