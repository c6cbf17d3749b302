"""The step log: which steps, which rates, and that it never stops training."""

import errno

import pytest

from maxlite.config import TelemetryConfig
from maxlite.telemetry.console import Console, duration
from maxlite.telemetry.metrics_file import read_metrics
from maxlite.telemetry.run_log import RunLog, StepCost
from maxlite.telemetry.timer import FinishedStep

COST = StepCost(tokens=100, flops_per_device=4e12, peak_tflops=10.0)


def open_log(folder, resumed=0, last=10, **keys):
    return RunLog(folder, TelemetryConfig(**keys), Console(), COST, resumed, last, lambda: 1.5)


def finished(step, ready_at, seconds=0.5, finite=1.0):
    metrics = {"loss": 2.0 / step, "learning_rate": 0.1, "grad_norm": 1.0, "finite": finite}
    return FinishedStep(step, metrics, seconds, ready_at)


def test_logged_steps_and_rates(tmp_path, capsys):
    with open_log(tmp_path, log_period=4, eval_interval=6) as log:
        for step in range(1, 11):
            log.finished(finished(step, ready_at=10.0 + 2 * step))
            if step == 6:
                log.evaluated(6, 3.25)
        assert log.evaluation_of(6) is None
        assert log.tokens_per_second == 200.0
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 4, 6, 8, 10]
    assert records[2]["eval_loss"] == 3.25
    first, second = records[:2]
    assert first["tokens_per_second"] == 200.0, "from its own dispatch"
    assert second["tokens_per_second"] == pytest.approx(3 * 100 / 6), "all the time since the line before"
    assert second["tflops_per_device"] == pytest.approx(8.0)
    assert second["peak_share"] == pytest.approx(0.8)
    assert second["work_at_risk_seconds"] == 1.5
    assert "80% of peak" in capsys.readouterr().out


def test_the_logged_steps_do_not_depend_on_where_a_run_was_cut(tmp_path):
    with open_log(tmp_path, log_period=4) as log:
        for step in range(1, 7):
            log.finished(finished(step, step))
    with open_log(tmp_path, resumed=5, log_period=4) as log:
        for step in range(6, 11):
            log.finished(finished(step, step))
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 4, 8, 10]


def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path, capsys, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_log(tmp_path, log_period=1) as log:
        monkeypatch.setattr("os.pwrite", full)
        log.finished(finished(1, 1.0))
        log.finished(finished(2, 2.0))
    output = capsys.readouterr().out
    assert output.count("No space left on device") == 1
    assert "step 2/10" in output


def test_the_last_evaluation_is_known_after_a_restart(tmp_path):
    with open_log(tmp_path) as log:
        log.finished(finished(10, 1.0))
        log.evaluated(10, 2.5)
    with open_log(tmp_path, resumed=10) as log:
        assert log.evaluation_of(10) == 2.5


def test_the_last_loss_is_that_of_the_last_logged_step(tmp_path):
    with open_log(tmp_path, log_period=4) as log:
        assert log.last_loss is None
        for step in range(1, 7):
            log.finished(finished(step, step))
        assert log.last_loss == (4, 0.5)
    with open_log(tmp_path, resumed=4) as log:
        assert log.last_loss == (4, 0.5), "known after a restart"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (42.4, "42 s"),
        (59.7, "1 min 00 s"),
        (119.7, "2 min 00 s"),
        (185, "3 min 05 s"),
        (3599.8, "1 h 00 min"),
        (7620, "2 h 07 min"),
    ],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_tensorboard_is_written_when_it_is_installed(tmp_path):
    pytest.importorskip("tensorboardX")
    with open_log(tmp_path, log_period=1, enable_tensorboard=True) as log:
        log.finished(finished(1, 1.0))
    assert any((tmp_path / "tensorboard").iterdir())
