"""Training as several real processes on this machine: one run, one decision, and what happens when one is gone."""

import itertools
import random
import re
import signal
import time

import pytest

from maxlite.telemetry.events import read_events
from maxlite.telemetry.metrics_file import read_metrics

# What a run that saves nothing ends with when it is stopped.
NOT_SAVED = 3
UNSAVED = "enable_checkpointing=false"
ENDLESS = ["steps=1000000", "eval_steps=0", UNSAVED]
LOST = "died or left"


@pytest.fixture
def start_two(start_several):
    return start_several


def numbers(run):
    keys = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    return [{key: record.get(key) for key in keys} for record in read_metrics(run.directory / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("plan", [(), ("ici_data_parallelism=2", "gradient_accumulation_steps=2")])
def test_two_processes_train_as_one_process_with_two_devices(start_two, make_run, plan):
    arguments = ["steps=6", "eval_interval=3", UNSAVED, *plan]
    two = start_two(*arguments)
    statuses, outputs, errors = two.end()
    assert statuses == [0, 0], errors
    assert "final step       6 of 6" in outputs[0]
    assert not outputs[1]
    one = make_run("one")
    one.train(*arguments, "per_device_batch_size=2", "log_period=1", devices=2)
    assert numbers(two.run) == numbers(one)


@pytest.mark.slow
@pytest.mark.parametrize(("index", "number"), [(0, signal.SIGINT), (1, signal.SIGTERM)])
def test_a_signal_to_one_stops_both_at_the_same_step(start_two, index, number):
    two = start_two(*ENDLESS)
    two.wait_for_step(5)
    two.processes[index].send_signal(number)
    statuses, outputs, errors = two.end(timeout=60)
    # Had one gone a step further than the other, it would have waited there for a process that is gone.
    assert statuses == [NOT_SAVED, NOT_SAVED], errors
    assert not any(LOST in error or "Traceback" in error for error in errors), errors
    by = number.name if index == 0 else "a signal to another process"
    last = re.search(r"final step +(\d+) of", outputs[0])[1]
    assert f"{by}: step {last} is not saved" in outputs[0]
    assert numbers(two.run)[-1]["step"] == int(last)


@pytest.mark.slow
def test_a_signal_while_compiling_stops_both_after_their_first_steps(start_two):
    two = start_two(*ENDLESS, "jax_cache_dir=null")
    two.wait(lambda: "compiling the train step" in two.output(0))
    two.processes[1].terminate()
    statuses, outputs, errors = two.end(timeout=60)
    assert statuses == [NOT_SAVED, NOT_SAVED], errors
    assert not any(LOST in error for error in errors), errors
    # The flag rides on the first step, whose result is read while the second is computed.
    assert int(re.search(r"final step +(\d+) of", outputs[0])[1]) <= 2


@pytest.mark.slow
def test_a_signal_while_evaluating_stops_both_at_the_same_batch(start_two):
    two = start_two(
        "steps=1000000",
        UNSAVED,
        "eval_interval=3",
        "eval_fraction=0.9",
        "eval_per_device_batch_size=1",
        "max_target_length=4",
    )
    two.wait_for_step(3)
    two.processes[1].terminate()
    statuses, outputs, errors = two.end(timeout=60)
    assert statuses == [NOT_SAVED, NOT_SAVED], errors
    assert not any(LOST in error for error in errors), errors
    assert "final step       3 of" in outputs[0]
    assert "held-out loss    not evaluated" in outputs[0]


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_when_one_is_killed_the_other_leaves_by_itself(start_two, index):
    two = start_two(*ENDLESS)
    two.wait_for_step(5)
    two.processes[index].kill()
    statuses, _, errors = two.end(timeout=60)
    assert statuses[index] == -signal.SIGKILL
    assert statuses[1 - index] == NOT_SAVED
    error = errors[1 - index]
    assert f"process {1 - index}: error: process {index} died or left" in error
    assert "restart all processes with the same command" in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_when_one_stands_still_the_other_leaves_by_itself(start_two):
    two = start_two(*ENDLESS, "jax_distributed_heartbeat_timeout_seconds=5")
    two.wait_for_step(5)
    two.processes[1].send_signal(signal.SIGSTOP)
    assert two.processes[0].wait(timeout=60) == NOT_SAVED, two.errors(0)
    assert "process 0: error: process 1 died or left" in two.errors(0)


@pytest.mark.slow
def test_bad_input_on_one_ends_both(start_two):
    two = start_two(*ENDLESS, "jax_distributed_heartbeat_timeout_seconds=5", of_one=["text_files=/nowhere.txt"])
    statuses, _, errors = two.end(timeout=60)
    assert statuses == [NOT_SAVED, 2], errors
    assert "process 1: error: text_files" in errors[1]
    assert LOST not in errors[1]
    assert "process 0: error: process 1 died or left" in errors[0]
    assert not any("Traceback" in error for error in errors)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_so_on_both(start_two):
    two = start_two(
        "steps=40", "learning_rate=1e30", "opt_type=sgd", "gradient_clipping_threshold=0", "eval_steps=0", UNSAVED
    )
    statuses, outputs, errors = two.end(timeout=60)
    assert statuses == [4, 4], errors
    assert "is not finite" in outputs[0]
    assert not any(LOST in error for error in errors), errors


# Nothing here depends on `steps`, so that a run can be told its last step after its last kill.
SAVING = [
    "base_mlp_dim=2048",  # 5 MB of state, so that a save takes longer than a look at the directory
    "enable_continuous_checkpointing=true",
    "lr_schedule_type=constant",
    "learning_rate_schedule_steps=1000",
    "eval_interval=7",
    "eval_steps=2",
]
FOREVER = "steps=100000000"


def one_process(run, *arguments):
    """The same training by one process with two devices."""
    return run.train(*SAVING, "per_device_batch_size=2", "log_period=1", *arguments, devices=2)


def must_end_as_the_run_never_stopped(start_two, run, whole, *arguments):
    last = run.steps()[-1] + 5
    statuses, outputs, errors = start_two(*SAVING, f"steps={last}", *arguments, run=run).end()
    assert statuses == [0, 0], errors
    assert f"resuming from step {last - 5} of {last}" in outputs[0]
    one_process(whole, f"steps={last}")
    assert run.arrays(last) == whole.arrays(last)
    assert numbers(run) == numbers(whole)


@pytest.mark.slow
def test_two_and_one_continue_each_others_run_bit_for_bit(start_two, make_run):
    best = "keep_best_n_checkpoints=2"
    two = start_two(*SAVING, best, "steps=21")
    run = two.run
    statuses, _, errors = two.end()
    assert statuses == [0, 0], errors
    saves = [event for event in read_events(run.directory / "events.jsonl") if event["event"] == "save"]
    assert run.left_in_checkpoints() == sorted(map(str, run.steps())), "something was left"
    steps = [event["step"] for event in saves]
    assert steps == sorted(set(steps))
    assert set(run.steps()) <= set(steps)
    assert set(steps[-10:]) <= set(run.steps())
    # No save is started before the one before it has ended, which would hold training: by votes, from the second step
    # on after a start. What is evaluated, and the last state, is saved whatever is being written.
    assert all(b - a >= 2 for a, b in itertools.pairwise(steps) if b % 7 and b != 21), steps

    assert "resuming from step 21 of 28" in one_process(run, best, "steps=28")
    statuses, outputs, errors = start_two(*SAVING, best, "steps=42", run=run).end()
    assert statuses == [0, 0], errors
    assert "resuming from step 28 of 42" in outputs[0]
    whole = make_run("whole")
    one_process(whole, best, "steps=42")
    assert run.arrays(42) == whole.arrays(42)
    assert numbers(run) == numbers(whole)


@pytest.mark.slow
def test_a_run_of_two_terminated_at_random_instants_is_the_run_never_stopped(start_two, make_run):
    instants, run, whole = random.Random(0), make_run("terminated"), make_run("whole")
    for signalled in ([0], [1], [0, 1], [1]):
        before = run.steps()[-1:]
        two = start_two(*SAVING, FOREVER, run=run)
        two.wait(lambda before=before: run.steps()[-1:] != before)
        time.sleep(instants.uniform(0, 0.7))
        for index in signalled:
            two.processes[index].terminate()
        statuses, outputs, errors = two.end(timeout=60)
        assert statuses == [5, 5], errors
        assert not any("Traceback" in text for text in two.printed()), two.printed()
        assert f"step {run.steps()[-1]} is saved" in outputs[0]
        assert run.left_in_checkpoints() == sorted(map(str, run.steps())), "a save was left unfinished"
    must_end_as_the_run_never_stopped(start_two, run, whole)


@pytest.mark.slow
def test_a_run_of_two_of_which_one_is_killed_while_saving_is_the_run_never_killed(start_two, make_run):
    instants, run, whole = random.Random(0), make_run("killed"), make_run("whole")
    for kill in range(5):
        before = run.steps()
        two = start_two(*SAVING, FOREVER, run=run)
        two.wait(lambda before=before: run.steps()[-1:] != before[-1:])
        later = time.monotonic() + instants.uniform(0, 0.5)
        two.wait(
            lambda later=later: time.monotonic() > later and any("tmp" in name for name in run.left_in_checkpoints())
        )
        two.processes[kill % 2].kill()
        began = time.monotonic()
        statuses, outputs, errors = two.end(timeout=60)
        print(f"kill {kill}: the other left after {time.monotonic() - began:.1f} s")
        assert statuses[kill % 2] == -signal.SIGKILL
        assert statuses[1 - kill % 2] == NOT_SAVED, errors
        assert LOST in errors[1 - kill % 2]
        if before:
            assert f"resuming from step {before[-1]} of" in outputs[0]
        assert all((run.checkpoints / str(step) / "commit_success.txt").exists() for step in run.steps())
    must_end_as_the_run_never_stopped(start_two, run, whole)
    assert run.left_in_checkpoints() == sorted(map(str, run.steps())), "leftovers of a killed run"


@pytest.mark.slow
def test_a_directory_that_is_not_shared_is_refused_by_both(start_two, tmp_path):
    two = start_two(*SAVING, FOREVER, of_one=[f"base_output_directory={tmp_path / 'other'}"])
    statuses, _, errors = two.end(timeout=60)
    assert statuses == [2, 2], errors
    assert all("is not shared: this process does not see what process 0 wrote there" in text for text in errors)
    assert all("base_output_directory must be one directory for all processes" in text for text in errors)


@pytest.mark.slow
def test_two_start_from_the_state_of_another_run(start_two):
    # Only the primary's clock says that a save of the first state is due.
    first = start_two(*SAVING, "steps=4")
    assert first.end()[0] == [0, 0]
    second = start_two(*SAVING, "steps=8", f"load_full_state_path={first.run.directory}")
    statuses, _, errors = second.end(timeout=60)
    assert statuses == [0, 0], errors
    assert 4 in second.run.steps()
