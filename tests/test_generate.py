"""Sampling from a run."""

import subprocess
import sys

import pytest


@pytest.fixture
def run(make_run):
    run = make_run("a")
    run.train("steps=60", "learning_rate=1e-2")
    return run


def generate(*arguments, expect=0):
    command = [sys.executable, "-m", "maxlite.generate", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == expect, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_samples_go_on_from_the_prompt(run):
    greedy = generate(run.directory, "prompt=the cat ", "temperature=0", "max_new_tokens=16")
    assert greedy.stdout.startswith("the cat ")
    assert len(greedy.stdout) == len("the cat ") + 16 + 1
    assert "step 60" in greedy.stderr
    again = generate(run.directory, "prompt=the cat ", "temperature=0", "max_new_tokens=16", "generate_seed=5")
    assert again.stdout == greedy.stdout
    one, two = (generate(run.directory, f"generate_seed={seed}", "temperature=2").stdout for seed in (1, 2))
    assert one != two


def test_a_run_of_eight_devices_is_sampled_on_one(make_run):
    run = make_run("x=y")
    run.train("steps=4", "per_device_batch_size=0.5", "ici_tensor_parallelism=2", "ici_fsdp_parallelism=4", devices=8)
    assert generate(run.directory, "prompt=a", "max_new_tokens=4").stdout.startswith("a")


def test_an_unreadable_checkpoint_is_said(run):
    for step in (run.directory / "checkpoints").iterdir():
        for file in step.rglob("*"):
            if file.is_file() and "c" in file.parts:  # an array's values
                file.write_bytes(b"")
    assert "is damaged; nothing was changed" in generate(run.directory, expect=3).stderr


def test_bad_input_is_said(run, tmp_path):
    assert "usage" in generate(expect=2).stderr
    assert "config.yml" in generate(tmp_path, expect=2).stderr
    assert "tokens" in generate(run.directory, f"prompt={'x' * 40}", expect=2).stderr
    assert "temperature" in generate(run.directory, "temprature=1", expect=2).stderr
    for step in (run.directory / "checkpoints").iterdir():
        step.rename(step.with_name(f"gone-{step.name}"))
    assert "no committed checkpoint" in generate(run.directory, expect=2).stderr
