"""Training as a user does it: start, stop, kill, resume, and what is on disk and on the screen after it."""

import json
import math
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from maxlite.checkpoint import layout
from maxlite.checkpoint.orbax_io import describe, read_arrays
from maxlite.telemetry.metrics_file import read_metrics

CONTINUOUS = ["enable_continuous_checkpointing=true"]


def committed(run):
    return layout.steps(layout_path(run))[0]


def layout_path(run):
    from etils import epath

    return epath.Path(run.directory / "checkpoints")


def state_bytes(run, step):
    """Every array of a checkpoint, as bytes, by name."""
    import jax

    path = layout.step_path(layout_path(run), step)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(info.shape, np.dtype(info.dtype), sharding=device)
        for name, info in describe(path / "state").items()
    }
    return {name: np.asarray(array).tobytes() for name, array in read_arrays(path / "state", wanted).items()}


def losses(run):
    return [
        {key: record.get(key) for key in ("step", "loss", "grad_norm", "learning_rate", "eval_loss")}
        for record in read_metrics(run.directory / "metrics.jsonl")
    ]


def wait_for_step(run, process, step):
    """Waits until the run has logged `step`."""
    deadline = time.monotonic() + 120
    metrics = run.directory / "metrics.jsonl"
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and any(record["step"] >= step for record in read_metrics(metrics)):
            return
        time.sleep(0.005)
    raise AssertionError(f"step {step} was not reached: {process.communicate()}")


def test_a_run_ends_with_its_state_saved_its_metrics_on_file_and_the_way_on(make_run):
    run = make_run("a")
    output = run.train("steps=12", "eval_interval=10", *CONTINUOUS)
    records = read_metrics(run.directory / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 5, 10, 12]
    keys = {"step", "loss", "learning_rate", "grad_norm", "step_seconds", "tokens_per_second", "work_at_risk_seconds"}
    assert all(keys <= record.keys() for record in records)
    assert [record["step"] for record in records if "eval_loss" in record] == [10, 12]
    assert records[-1]["loss"] < records[0]["loss"]
    assert committed(run)[0] == 12
    assert "steps: 12" in (run.directory / "config.yml").read_text()

    tail = output.split("\n\n")[-1]
    for row in (
        "final step",
        "held-out loss",
        "tokens/s",
        "saves committed",
        "interval P50",
        "blocked",
        "run directory",
    ):
        assert re.search(rf"^{re.escape(row)} ", tail, re.MULTILINE), row
    assert f"{records[-1]['eval_loss']:.4f}" in tail
    assert re.search(r"^resume +python -m maxlite.train .*steps=24$", tail, re.MULTILINE)
    assert re.search(rf"^sample +python -m maxlite.generate {run.directory} ", tail, re.MULTILINE)

    again = run.train("steps=12", "eval_interval=10", *CONTINUOUS)
    assert "resuming from step 12" in again
    assert "nothing left" in again
    assert read_metrics(run.directory / "metrics.jsonl") == records

    longer = run.train("steps=20", "eval_interval=10", *CONTINUOUS)
    assert "resuming from step 12 of 20" in longer
    assert "steps: 12 -> 20" in longer
    assert committed(run)[0] == 20


def test_a_run_interrupted_twice_is_bitwise_the_run_never_interrupted(make_run):
    arguments = ["steps=400", "eval_interval=100", "lr_schedule_type=cosine", *CONTINUOUS]
    whole, cut = make_run("whole"), make_run("cut")
    whole.train(*arguments)
    for step in (60, 220):
        process = cut.start(*arguments)
        wait_for_step(cut, process, step)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 5, output
        assert "saving after this step" in output
        assert f"step {committed(cut)[0]} is saved" in output
        # A save of a few steps before that is being written may be enough.
        assert int(re.search(r"^final step +(\d+) of 400$", output, re.MULTILINE)[1]) >= committed(cut)[0]
        assert 0 < committed(cut)[0] < 400, "the cut came too late to prove anything"
    assert "resuming from step" in cut.train(*arguments)
    assert state_bytes(cut, 400) == state_bytes(whole, 400)
    assert losses(cut) == losses(whole)


def test_a_run_done_in_two_parts_with_fixed_saves_and_accumulation_is_the_same(make_run):
    arguments = [
        "gradient_accumulation_steps=2",
        "checkpoint_period=7",
        "learning_rate_schedule_steps=30",
        "opt_type=muon",
    ]
    whole, parts = make_run("whole"), make_run("parts")
    whole.train("steps=30", *arguments)
    parts.train("steps=17", *arguments)
    parts.train("steps=30", *arguments)
    assert state_bytes(parts, 30) == state_bytes(whole, 30)
    assert {30, 17} <= set(committed(parts))


def answers_signals(process):
    """Whether the process has handlers of its own; Python itself has one for SIGINT, and none for SIGTERM."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)[1]
    return int(caught, 16) >> (signal.SIGTERM - 1) & 1


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("seconds", [0, 0.3, 0.6, 0.9, 1.2, 1.5, 2.0])
def test_an_interrupt_during_the_start_leaves_with_its_own_status(make_run, seconds):
    run = make_run("a")
    process = run.start("steps=100000000", "eval_steps=0")
    while not answers_signals(process):  # the interpreter starts, which is nobody's to answer for
        time.sleep(0.001)
    time.sleep(seconds)  # wherever that is: in an import, reading text, compiling
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 5, output
    assert "Traceback" not in output


def test_a_signal_during_the_last_evaluation_is_not_the_end(make_run):
    run = make_run("a")
    arguments = ["steps=5", "eval_fraction=0.9", "eval_per_device_batch_size=1", "max_target_length=4"]
    process = run.start(*arguments)
    wait_for_step(run, process, 5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert committed(run)[0] == 5
    if process.returncode == 5:  # it came in time
        assert "not evaluated" in output
    assert "held-out loss" in run.train(*arguments)
    assert "eval_loss" in read_metrics(run.directory / "metrics.jsonl")[-1]


def test_a_second_signal_leaves_at_once(make_run):
    run = make_run("a")
    process = run.start("steps=100000", "eval_steps=0")
    wait_for_step(run, process, 5)
    process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, -signal.SIGTERM)


def test_a_loss_that_is_not_finite_stops_the_run_and_is_never_saved(make_run):
    run = make_run("a")
    exploding = ["steps=40", "learning_rate=1e30", "opt_type=sgd", "gradient_clipping_threshold=0", *CONTINUOUS]
    output = run.train(*exploding, expect=4)
    step = int(re.search(r"error: step (\d+) is not finite", output).group(1))
    assert f"batch {step}" in output
    assert committed(run)
    assert all(saved < step for saved in committed(run))
    for saved in committed(run):
        for name, data in state_bytes(run, saved).items():
            if name.startswith("params/"):
                assert np.isfinite(np.frombuffer(data, np.float32)).all()


def test_losses_that_are_not_finite_can_be_skipped_but_not_for_ever(make_run):
    run = make_run("a")
    exploding = ["learning_rate=1e30", "opt_type=sgd", "gradient_clipping_threshold=0", "eval_steps=0"]
    output = run.train("steps=6", *exploding, "on_nonfinite=skip")
    assert "update refused" in output
    assert committed(run)[0] == 6
    run.train("steps=40", *exploding, "on_nonfinite=skip", expect=4)


def test_a_gone_reader_ends_the_printing_not_the_training(make_run):
    run = make_run("a")
    process = run.start("steps=60", "log_period=1", stderr=subprocess.DEVNULL)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert committed(run)[0] == 60


def test_stopping_a_run_that_saves_nothing_is_not_a_clean_end(make_run):
    run = make_run("a")
    process = run.start("steps=1000000", "eval_steps=0", "enable_checkpointing=false")
    wait_for_step(run, process, 5)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output
    assert "last saved       nothing" in output


def test_another_batch_size_is_refused_with_the_one_that_fits(make_run):
    run = make_run("a")
    run.train("steps=4")
    output = run.train("steps=8", "per_device_batch_size=8", expect=2)
    assert "global batch: 4 -> 8" in output
    assert "per_device_batch_size=4" in output
    run.train("steps=8", "per_device_batch_size=2", devices=2)


def test_settings_from_the_environment_are_part_of_the_way_on(make_run, monkeypatch):
    monkeypatch.setenv("M_STEPS", "3")
    assert re.search(r"^resume +M_STEPS=3 python -m maxlite.train .* steps=6$", make_run("a").train(), re.MULTILINE)


def test_other_data_is_refused_on_resume(make_run):
    run = make_run("a")
    run.train("steps=4")
    output = run.train("steps=8", "data_shuffle_seed=1", expect=2)
    assert "data_shuffle_seed" in output
    assert "another run_name" in output
    assert committed(run) == [4]
    assert "steps: 4" in (run.directory / "config.yml").read_text()


def test_another_model_is_refused_on_resume(make_run):
    run = make_run("a")
    run.train("steps=4")
    assert "base_mlp_dim: 64 -> 128" in run.train("steps=8", "base_mlp_dim=128", expect=2)
    # Allowed to change, it still does not fit the arrays.
    output = run.train("steps=8", "base_mlp_dim=128", "allow_config_change=true", expect=2)
    assert "layers/mlp/down/kernel" in output
    assert committed(run) == [4]


def test_a_run_goes_on_computed_in_another_way_and_dtype(make_run):
    run = make_run("a")
    run.train("steps=4", "scan_layers=true")
    output = run.train("steps=6", "scan_layers=false", "weight_dtype=bfloat16", "checkpoint_storage_use_ocdbt=true")
    assert "changed since the checkpoint: scan_layers: True -> False" in output
    assert re.search(r"changed dtype on the way in: .*: float32\[.*\] -> bfloat16 and \d+ more arrays", output)
    assert committed(run) == [6, 4]


def test_a_run_begins_with_the_parameters_or_the_state_of_another(make_run):
    first, parameters, whole = make_run("first"), make_run("parameters"), make_run("whole")
    first.train("steps=4")
    output = parameters.train("steps=2", f"load_parameters_path={first.directory}")
    assert f"load_parameters_path: step 4 of {first.directory}" in output
    assert "starting at step 0" in output
    output = whole.train("steps=6", f"load_full_state_path={first.directory / 'checkpoints' / '4'}")
    assert "starting at step 4 of 6" in output
    first.train("steps=6")
    assert state_bytes(whole, 6) == state_bytes(first, 6)
    assert state_bytes(parameters, 2) != state_bytes(first, 6)
    # Nothing left to train is no reason to save nothing.
    there = make_run("there")
    output = there.train("steps=6", f"load_full_state_path={first.directory}")
    assert "starting at step 6: nothing left of steps=6" in output
    assert state_bytes(there, 6) == state_bytes(first, 6)
    output = there.train("steps=6", f"load_full_state_path={first.directory}")
    assert "load_full_state_path is not read: the run goes on from its own checkpoints" in output


def test_a_run_directory_is_one_processs_at_a_time(make_run):
    run = make_run("a")
    process = run.start("steps=1000000", "eval_steps=0")
    wait_for_step(run, process, 1)
    output = run.train("steps=4", expect=2)
    assert str(process.pid) in output
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 5


def test_a_directory_that_cannot_be_made_is_bad_input(make_run):
    run = make_run("a")
    (run.folder / "runs").write_text("a file")
    assert "base_output_directory" in run.train("steps=4", expect=2)


def test_a_final_state_that_cannot_be_saved_is_not_a_success(make_run):
    run = make_run("a")
    process = run.start("steps=200", "eval_steps=0", "checkpoint_period=1000000")
    wait_for_step(run, process, 5)
    (run.directory / "checkpoints").rmdir()
    (run.directory / "checkpoints").write_text("not a directory")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 3, output
    assert "step 200" in output


def test_without_checkpointing_nothing_is_saved(make_run):
    run = make_run("a")
    run.train("steps=4", "enable_checkpointing=false")
    assert not (run.directory / "checkpoints").exists()


def test_synthetic_data_and_no_evaluation(make_run):
    run = make_run("a")
    output = run.train("steps=4", "dataset_type=synthetic")
    assert "not evaluated" in output
    assert math.isfinite(read_metrics(run.directory / "metrics.jsonl")[-1]["loss"])


def test_the_loss_does_not_depend_on_the_devices(make_run):
    one, eight = make_run("one"), make_run("eight")
    one.train("steps=6", "log_period=1", "per_device_batch_size=8")
    eight.train("steps=6", "log_period=1", "per_device_batch_size=1", devices=8)
    pairs = zip(losses(one), losses(eight), strict=True)
    assert all(abs(a["loss"] - b["loss"]) < 1e-5 for a, b in pairs)


def test_metrics_are_json_that_any_reader_takes(make_run):
    run = make_run("a")
    run.train("steps=12", "learning_rate=1e30", "opt_type=sgd", "gradient_clipping_threshold=0", expect=4)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    for line in (run.directory / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
