"""`metrics.jsonl`: exact floats, one object a step, whole after any cut."""

import json
import os

from hypothesis import given
from hypothesis import strategies as st

from maxlite.telemetry.metrics_file import MetricsFile, read_metrics


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_floats_read_back_exactly(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    with MetricsFile(path, 0) as file:
        for step, value in enumerate(values, 1):
            file.append({"step": step, "loss": value})
    assert [record["loss"] for record in read_metrics(path)] == values


def test_numbers_that_are_not_finite_become_null(tmp_path):
    with MetricsFile(tmp_path / "m", 0) as file:
        file.append({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    assert (tmp_path / "m").read_text() == '{"step": 1, "loss": null, "grad_norm": null}\n'


def test_a_held_out_loss_joins_the_line_of_its_step(tmp_path):
    with MetricsFile(tmp_path / "m", 0) as file:
        file.append({"step": 1, "loss": 2.0})
        file.extend_last({"eval_loss": 3.0})
        file.append({"step": 2, "loss": 1.0})
        assert file.last == {"step": 2, "loss": 1.0}
    assert read_metrics(tmp_path / "m") == [{"step": 1, "loss": 2.0, "eval_loss": 3.0}, {"step": 2, "loss": 1.0}]


@given(st.integers(0, 8), st.integers(0, 60), st.integers(0, 100), st.binary(max_size=30))
def test_resuming_keeps_whole_lines_up_to_the_step_and_no_others(tmp_path_factory, resumed, torn, at, garbage):
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    with MetricsFile(path, 0) as file:
        for step in range(1, 7):
            file.append({"step": step, "loss": step / 3})
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    damaged = whole[: len(whole) - torn]
    damaged = damaged[:at] + garbage + damaged[at + len(garbage) :]
    path.write_bytes(damaged)
    intact = [json.loads(line) for line in lines if line in damaged.splitlines(keepends=True)]
    with MetricsFile(path, resumed) as file:
        kept = read_metrics(path)
        assert [record for record in intact if record["step"] <= resumed] == [r for r in kept if r in intact]
        assert all(record["step"] <= resumed for record in kept)
        assert file.last == (kept[-1] if kept else {})
        file.append({"step": 9})
    assert read_metrics(path) == [*kept, {"step": 9}]


def test_a_write_done_in_parts_is_whole(tmp_path, monkeypatch):
    pwrite = os.pwrite
    with MetricsFile(tmp_path / "m", 0) as file:
        monkeypatch.setattr("os.pwrite", lambda descriptor, data, at: pwrite(descriptor, data[:3], at))
        file.append({"step": 1, "loss": 2.0})
        file.extend_last({"eval_loss": 3.0})
    assert read_metrics(tmp_path / "m") == [{"step": 1, "loss": 2.0, "eval_loss": 3.0}]
