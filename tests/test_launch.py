"""The launcher: what it does when a process ends, alone and with real runs."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from etils import epath

from maxlite.checkpoint import layout, load_arrays
from maxlite.children import Child, Children
from maxlite.launch import Ended, attend, environment, newest_step, supervise

# Other tests of the worker may have loaded jax, which warns of every fork; the launcher itself never loads it.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")

KILLED = Ended(1, -signal.SIGKILL)


class Attempts:
    """Attempts that end as given, each after gaining so many steps; what was said and how long was waited."""

    def __init__(self, capsys, *ends, received=()):
        self._ends, self._capsys, self._received = list(ends), capsys, list(received)
        self.step, self.pauses = None, []

    def attempt(self):
        ended, gained = self._ends.pop(0)
        if gained:
            self.step = (self.step or 0) + gained
        return ended

    def pause(self, seconds, received):
        self.pauses.append(seconds)

    def run(self, max_restarts=None):
        status = supervise(self.attempt, lambda: self.step, self._received, max_restarts, self.pause)
        assert not self._ends, "all attempts were needed"
        return status, self._capsys.readouterr().err.splitlines()


def test_a_run_of_years_is_still_restarted(capsys):
    attempts = Attempts(capsys, *[(Ended(1, 3), 1)] * 1100, (Ended(0, 0), 1))
    assert attempts.run()[0] == 0
    assert attempts.pauses[-1] == 60


def test_done_at_once(capsys):
    attempts = Attempts(capsys, (Ended(0, 0), 5))
    assert attempts.run() == (0, [])
    assert attempts.pauses == []


@pytest.mark.parametrize("status", [-signal.SIGKILL, -signal.SIGSEGV, 1, 3, 6])
def test_a_run_that_gains_is_restarted_ever_later(capsys, status):
    attempts = Attempts(capsys, *[(Ended(1, status), 10)] * 8, (Ended(0, 0), 5))
    done, lines = attempts.run()
    assert done == 0
    assert attempts.pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert len(lines) == 8
    assert lines[2].endswith("; step 30 is committed; restart 3 in 4 s")


@pytest.mark.parametrize(("status", "why"), [(2, "bad config"), (4, "not finite"), (5, "clean save")])
def test_some_ends_are_final(capsys, status, why):
    done, lines = Attempts(capsys, (Ended(1, status), 3)).run()
    assert done == status
    assert len(lines) == 1
    assert f"launch: process 1 ended with exit status {status} (" in lines[0]
    assert why in lines[0]


def test_a_run_that_gains_nothing_is_given_up(capsys):
    done, lines = Attempts(capsys, (KILLED, 0), (KILLED, 0)).run()
    assert done == 128 + 9
    assert lines == [
        "launch: process 1 was killed by SIGKILL; no step is committed; restart 1 in 1 s",
        "launch: process 1 was killed by SIGKILL; no step is committed; no step was gained since restart 1, giving up",
    ]
    done, lines = Attempts(capsys, (KILLED, 3), (KILLED, 3), (Ended(0, 1), 0)).run()
    assert done == 1
    assert lines[-1] == (
        "launch: process 0 ended with exit status 1 (an error); step 6 is committed; no step was gained since restart "
        "2, giving up"
    )


def test_restarts_are_limited_where_asked(capsys):
    done, lines = Attempts(capsys, (KILLED, 3), (KILLED, 3)).run(max_restarts=1)
    assert done == 137
    assert "--max-restarts 1 reached, giving up" in lines[-1]


def test_no_restart_after_a_signal(capsys):
    done, lines = Attempts(capsys, (Ended(0, 3), 3), received=[signal.SIGTERM]).run()
    assert done == 3
    assert "SIGTERM was passed on" in lines[-1]
    attempts = Attempts(capsys, (KILLED, 3))
    attempts.pause = lambda seconds, received: received.append(signal.SIGINT)
    done, lines = attempts.run()
    assert done == 137
    assert "SIGINT came, so there is no restart" in lines[-1]


def shell(*scripts, received=None, clock=time.monotonic, grace=0.0):
    """How an attempt of these scripts ends, and all exit statuses."""
    with Children([Child(["sh", "-c", script], os.environ) for script in scripts]) as children:
        ended = attend(children, [] if received is None else received, grace, clock)
        return ended, children.statuses()


SLEEP = "exec sleep 600"


def stubborn(ready):
    """A script that ignores signals, from when the file `ready` exists."""
    return f"trap '' TERM INT; touch {ready}; while :; do sleep 0.1; done"


def fast():
    """A clock that goes a second forward whenever it is looked at."""
    return itertools.count().__next__


def test_all_end_well():
    assert shell("exit 0", "sleep 0.2; exit 0") == (Ended(0, 0), [0, 0])


def test_when_one_fails_the_rest_are_stopped():
    assert shell(SLEEP, "exit 3") == (Ended(1, 3), [-signal.SIGTERM, 3])


def test_what_does_not_stop_is_killed(tmp_path, capfd):
    ready = tmp_path / "ready"
    fails = f"while ! test -e {ready}; do sleep 0.01; done; exit 1"
    ended, statuses = shell(stubborn(ready), fails, SLEEP, clock=fast())
    assert (ended, statuses) == (Ended(1, 1), [-signal.SIGKILL, 1, -signal.SIGTERM])
    assert "process 0 did not leave in time and is killed" in capfd.readouterr().err


def test_the_one_that_lost_another_is_not_the_cause():
    children = Children([Child(["sh", "-c", f"exit {status}"], os.environ) for status in (3, 1, 3)])
    with children:
        while None in children.statuses():
            children.pump(0.05)
        assert attend(children, [], 0.0) == Ended(1, 1)


def test_a_clean_end_of_one_by_a_signal_leaves_the_others_their_time():
    assert shell("sleep 0.3; exit 5", "exit 5", clock=fast(), grace=60.0) == (Ended(1, 5), [5, 5])


class Signals:
    """A clock that also lets a signal come as soon as each of these files exists."""

    def __init__(self, number, *files):
        self.received = []
        self._number, self._files, self._now = number, list(files), 0.0

    def __call__(self):
        if self._files and self._files[0].exists():
            del self._files[0]
            self.received.append(self._number)
        self._now += 1.0 * (not self._files)
        return self._now


def test_signals_are_passed_on_and_the_second_too(tmp_path):
    up, first = tmp_path / "up", tmp_path / "first"
    script = f"trap 'trap \"exit 7\" TERM; touch {first}' TERM; touch {up}; while :; do sleep 0.05; done"
    signals = Signals(signal.SIGTERM, up, first)
    assert shell(script, received=signals.received, clock=signals, grace=600.0) == (Ended(0, 7), [7])
    assert signals.received == [signal.SIGTERM] * 2


def test_a_process_that_ignores_a_signal_is_killed_after_the_grace(tmp_path):
    ready = tmp_path / "ready"
    signals = Signals(signal.SIGINT, ready)
    ended, statuses = shell(stubborn(ready), received=signals.received, clock=signals, grace=3.0)
    assert (ended, statuses) == (Ended(0, -signal.SIGKILL), [-signal.SIGKILL])


def test_every_process_gets_its_place_and_its_devices(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b=2")
    of_one = environment(1, 4, 1234, devices=2)
    assert of_one["JAX_COORDINATOR_ADDRESS"] == "127.0.0.1:1234"
    assert (of_one["JAX_NUM_PROCESSES"], of_one["JAX_PROCESS_ID"]) == ("4", "1")
    assert of_one["XLA_FLAGS"].split() == ["--xla_a=1", "--xla_b=2", "--xla_force_host_platform_device_count=2"]
    assert of_one["JAX_LOCAL_DEVICE_IDS"] == "2,3"
    alone = environment(0, 1, 1234, devices=None)
    assert alone["XLA_FLAGS"] == os.environ["XLA_FLAGS"]
    assert "JAX_COORDINATOR_ADDRESS" not in alone


def test_steps_are_seen_as_the_checkpointer_sees_them(tmp_path):
    assert newest_step(tmp_path / "none") is None
    for name in ("3", "20", "100", "120.orbax-checkpoint-tmp-4", "110.set-aside-1", "latest"):
        (tmp_path / name).mkdir()
    for name in ("3", "20", "110.set-aside-1", "latest"):
        (tmp_path / name / layout.COMMIT_MARKER).touch()
    committed, _ = layout.steps(epath.Path(tmp_path))
    assert newest_step(tmp_path) == max(committed) == 20


def launch(run, *arguments, processes=2, options=()):
    program = ("-m", "maxlite.launch", "--processes", str(processes), *options)
    return run.start(*SAVING, *arguments, program=program, stderr=subprocess.PIPE)


def ended(process, timeout=240):
    output, errors = process.communicate(timeout=timeout)
    return process.returncode, output, errors


def until(process, reached, seconds=240):
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--processes", "2", "run_name=r", "steps=x"], "command line: steps=x: expected whole number"),
        (["run_name=r"], "--processes and --devices-per-process: expected 1 or more"),
        (["--processes", "0", "run_name=r"], "--processes and --devices-per-process: expected 1 or more"),
        (["--processes", "two", "run_name=r"], "argument --processes: 'two' is not a whole number"),
        (
            ["--processes", "2", "run_name=r", "coordinator_address=a:1", "num_processes=2"],
            "coordinator_address, num_processes and process_id are the launcher's to give",
        ),
    ],
)
def test_bad_input_is_said_once_and_before_jax_is_loaded(arguments, words):
    program = "import sys; from maxlite.launch import main; s = main(sys.argv[1:]); assert 'jax' not in sys.modules"
    command = [sys.executable, "-c", f"{program}; sys.exit(s)", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {words}")
    assert done.stderr.count("\n") == 1


# Nothing here depends on `steps`, so that a run can be told its last step after its last start.
SAVING = [
    "base_num_decoder_layers=1",
    "enable_continuous_checkpointing=true",
    "max_num_checkpoints_to_keep=1000",
    "lr_schedule_type=constant",
    "learning_rate_schedule_steps=1000",
    "per_device_batch_size=1",
    "eval_steps=0",
]
FOREVER = "steps=100000000"


@pytest.mark.slow
def test_a_run_of_which_a_process_is_killed_gains_and_finishes(make_run):
    run = make_run("killed")
    process = launch(run, "steps=100")
    pids = re.findall(r"\d+", process.stderr.readline().partition("pids")[2])
    until(process, run.steps)
    os.kill(int(pids[1]), signal.SIGKILL)
    status, output, errors = ended(process)
    assert status == 0, errors
    assert re.search(r"launch: process 1 was killed by SIGKILL; step \d+ is committed; restart 1 in 1 s\n", errors)
    assert re.search(r"^\[0\] resuming from step [1-9]\d* of 100$", output, re.MULTILINE)
    assert "[0] 2 processes of 1 device each" in output
    assert re.search(r"^\[0\] resume +python -m maxlite.launch --processes 2 ", output, re.MULTILINE)
    assert all(re.match(r"\[[01]\] |\[Gloo\]", line) for line in output.splitlines()), output


@pytest.mark.slow
def test_four_are_stopped_by_a_signal_and_two_go_on(make_run):
    run, whole = make_run("four"), make_run("whole")
    process = launch(run, FOREVER, processes=4)
    until(process, run.steps)
    process.terminate()
    status, output, errors = ended(process)
    assert status == 5, errors
    step = run.steps()[-1]
    assert f"[0] SIGTERM: step {step} is saved" in output
    assert "ended with exit status 5 (stopped by a signal after a clean save)" in errors

    two = launch(run, f"steps={step + 4}", options=["--devices-per-process", "2"])
    status, output, errors = ended(two)
    assert status == 0, errors
    assert f"[0] resuming from step {step} of {step + 4}" in output
    whole.train(*SAVING, f"steps={step + 4}", devices=4)
    expected = load_arrays(whole.checkpoints / str(step + 4))
    for name, array in load_arrays(run.checkpoints / str(step + 4)).items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-6, atol=1e-6, err_msg=name)
