"""The last lines of a run: a row for each thing that a person looks for, in the same words every time."""

from collections import namedtuple

import pytest

from maxlite.config import TelemetryConfig
from maxlite.telemetry.console import Console
from maxlite.telemetry.run_log import RunLog, StepCost
from maxlite.telemetry.summary import summary
from maxlite.telemetry.timer import FinishedStep

RESUME = "python -m maxlite.train c.yml"
Interval = namedtuple("Interval", "steps seconds")


class Saves:
    """A run of 100 seconds."""

    committed, failed, last_failure, last_committed_step = 1234, 0, "", 10
    blocked_seconds, slow_down_share = 0.25, 0.031
    intervals = {50: Interval(7.0, 1.5), 90: Interval(9.4, 2.25), 100: Interval(1200.0, 61.0)}  # noqa: RUF012

    def __init__(self, **values):
        for name, value in values.items():
            setattr(self, name, value)

    def clock(self):
        return 100.0

    def interval(self, percentile):
        return self.intervals.get(percentile)

    def blocked_share(self, now):
        return self.blocked_seconds / now

    def work_at_risk_seconds(self, now):
        return now - 87.5


@pytest.fixture
def log(tmp_path):
    cost = StepCost(tokens=1000, flops_per_device=1e12, peak_tflops=None)
    with RunLog(tmp_path, TelemetryConfig(), Console(), cost, 0, 10, lambda: 0.0) as log:
        yield log


def finish(log, step):
    log.finished(FinishedStep(step, {"loss": 2.5, "learning_rate": 0.1, "grad_norm": 1.0, "finite": 1.0}, 0.5, step))


def rows(lines):
    """The rows by name; a name is what comes before the column of values."""
    assert lines[0] == ""
    assert all(line[16] == " " for line in lines[1:])
    return {line[:16].strip(): line[17:] for line in lines[1:]}


def test_a_finished_run(log, tmp_path):
    for step in range(1, 11):
        finish(log, step)
    log.evaluated(10, 2.25)
    assert rows(summary(10, 10, log, Saves(), tmp_path, RESUME)) == {
        "final step": "10 of 10",
        "training loss": "2.5000 nats per token (step 10)",
        "held-out loss": "2.2500 nats per token",
        "tokens/s": "2,000 (median step)",
        "saves committed": "1234",
        "last saved": "step 10",
        "interval P50": "7 steps, 1.50 s",
        "interval P90": "9 steps, 2.25 s",
        "interval max": "1,200 steps, 61.00 s",
        "blocked": "0.25 s of training held by saves, 0.2% of the run",
        "slow-down": "3.1% of the time of all steps, for the saves being written beside them",
        "work at risk": "none",
        "run directory": str(tmp_path),
        "resume": RESUME,
        "sample": f"python -m maxlite.generate {tmp_path} prompt='The people'",
    }


def test_a_run_that_was_cut_and_could_not_save(log, tmp_path):
    finish(log, 1)
    saves = Saves(failed=2, last_failure="No space left on device: /a", last_committed_step=4)
    shown = rows(summary(7, 10, log, saves, tmp_path / "a b", RESUME))
    assert shown["final step"] == "7 of 10"
    assert shown["training loss"] == "2.5000 nats per token (step 1)"
    assert shown["held-out loss"] == "not evaluated"
    assert shown["saves failed"] == "2, the last one: No space left on device: /a"
    assert shown["last saved"] == "step 4"
    assert shown["work at risk"] == "12.50 s of training is not saved"
    assert shown["resume"] == RESUME
    assert f"'{tmp_path / 'a b'}'" in shown["sample"]


def test_a_run_that_did_nothing(log, tmp_path):
    nothing = Saves(committed=0, last_committed_step=None, intervals={}, slow_down_share=None, blocked_seconds=0.0)
    shown = rows(summary(0, 10, log, nothing, tmp_path, RESUME))
    assert shown["training loss"] == "not logged"
    assert shown["tokens/s"] == "no step was left to do"
    assert shown["last saved"] == "nothing"
    assert shown["interval P50"] == "under two saves"
    assert not shown.keys() & {"interval P90", "interval max", "saves failed"}
    assert shown["slow-down"].startswith("not known")
