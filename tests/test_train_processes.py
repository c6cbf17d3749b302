"""Training as several real processes on this machine: one run, one decision, and what happens when one is gone."""

import re
import signal
import socket
import subprocess
import time

import pytest

from maxlite.telemetry.metrics_file import read_metrics

# What a run that saves nothing ends with when it is stopped.
NOT_SAVED = 3
ENDLESS = ["steps=1000000", "eval_steps=0"]
LOST = "died or left"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Two:
    """Two processes of one device each that train a run together."""

    def __init__(self, run, *arguments, of_one=()):
        shared = [
            f"coordinator_address=127.0.0.1:{free_port()}",
            "num_processes=2",
            "per_device_batch_size=2",
            "enable_checkpointing=false",
            "log_period=1",
        ]
        self.run = run
        self.processes = [
            run.start(*shared, f"process_id={index}", *arguments, *(of_one if index else ()), stderr=subprocess.PIPE)
            for index in range(2)
        ]

    def wait_for_step(self, step):
        metrics = self.run.directory / "metrics.jsonl"
        self.wait(lambda: metrics.exists() and any(record["step"] >= step for record in read_metrics(metrics)))

    def wait(self, reached):
        deadline = time.monotonic() + 120
        while not reached():
            assert time.monotonic() < deadline, [process.kill() for process in self.processes]
            assert all(process.poll() is None for process in self.processes), self.end()
            time.sleep(0.005)

    def end(self, timeout=120):
        """Waits for both: exit statuses, outputs, errors."""
        try:
            texts = [process.communicate(timeout=timeout) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        outputs, errors = zip(*texts, strict=True)
        # Gloo tells of its connections by itself.
        outputs = ["".join(re.findall(r"^(?!\[Gloo\]).*\n", output, re.MULTILINE)) for output in outputs]
        return [process.returncode for process in self.processes], outputs, errors


@pytest.fixture
def start_two(make_run):
    started = []

    def start(*arguments, **options):
        started.append(Two(make_run(f"two{len(started)}"), *arguments, **options))
        return started[-1]

    yield start
    for two in started:
        for process in two.processes:
            process.kill()
            process.communicate()


def numbers(run):
    keys = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    return [{key: record.get(key) for key in keys} for record in read_metrics(run.directory / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("plan", [(), ("ici_data_parallelism=2",), ("gradient_accumulation_steps=2",)])
def test_two_processes_train_as_one_process_with_two_devices(start_two, make_run, plan):
    arguments = ["steps=6", "eval_interval=3", *plan]
    two = start_two(*arguments)
    statuses, outputs, errors = two.end()
    assert statuses == [0, 0], errors
    assert "final step       6 of 6" in outputs[0]
    assert not outputs[1]
    one = make_run("one")
    one.train(*arguments, "per_device_batch_size=2", "log_period=1", "enable_checkpointing=false", devices=2)
    assert numbers(two.run) == numbers(one)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("index", [0, 1])
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
    while "compiling the train step" not in (line := two.processes[0].stdout.readline()):
        assert line, two.end()
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
    _, error = two.processes[0].communicate(timeout=60)
    assert two.processes[0].returncode == NOT_SAVED, error
    assert "process 0: error: process 1 died or left" in error


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
    two = start_two("steps=40", "learning_rate=1e30", "opt_type=sgd", "gradient_clipping_threshold=0", "eval_steps=0")
    statuses, outputs, errors = two.end(timeout=60)
    assert statuses == [4, 4], errors
    assert "is not finite" in outputs[0]
    assert not any(LOST in error for error in errors), errors
