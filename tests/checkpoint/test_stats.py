"""What saves cost: intervals over every save of a long run in bounded memory, shares, and one line per save."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.checkpoint import stats
from maxlite.checkpoint.stats import Commits, SaveRecord, SaveStats

SECONDS = st.floats(1e-3, 1e4)
RECORD = SaveRecord(
    step=120,
    started=1000.0,
    committed=1000.61,
    wait_seconds=0.01,
    device_to_host_seconds=0.02,
    write_seconds=0.4,
    digest_seconds=0.05,
    commit_seconds=0.1,
    blocked_seconds=0.03,
    bytes=1_020_000_000,
)


def test_a_save_in_a_line():
    assert RECORD.line() == (
        "saved step 120: 1.02 GB in 0.61 s (1.67 GB/s; device to host 0.02, write 0.40, digest 0.05, commit 0.10) "
        "after 0.01 s for its result, training held for 0.03 s"
    )
    instant = SaveRecord(1, 5.0, 5.0, bytes=10)
    assert instant.gb_per_second == 0, "a clock that stands still divides by nothing"
    assert instant.line().startswith("saved step 1: 10 B in 0.00 s (0 B/s; ")


def test_a_save_as_an_event():
    event = json.loads(json.dumps(RECORD.to_event()))
    assert event == {
        "step": 120,
        "wait_seconds": 0.01,
        "device_to_host_seconds": 0.02,
        "write_seconds": 0.4,
        "digest_seconds": 0.05,
        "commit_seconds": 0.1,
        "blocked_seconds": 0.03,
        "bytes": 1_020_000_000,
        "seconds": pytest.approx(0.61),
        "gb_per_second": pytest.approx(1.02 / 0.61),
    }


@settings(deadline=None)
@given(st.integers(1000, 10**15 - 10**12))
def test_sizes_are_three_digits_of_the_right_unit(count):
    text = SaveRecord(1, 0.0, 1.0, bytes=count).line()
    number, unit = re.search(r"saved step 1: ([\d.]+) ([TGMk]B) in", text).groups()
    assert float(number) * {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}[unit] == pytest.approx(count, rel=0.005)
    assert len(number.replace(".", "")) == 3
    assert 1 <= float(number) < 1000


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 1000), SECONDS), min_size=2, max_size=30), st.integers(0, 100))
def test_intervals_are_those_between_commits(moves, percentile):
    seen = SaveStats(safe_since=0.0)
    steps, times = np.cumsum([steps for steps, _ in moves]), np.cumsum([seconds for _, seconds in moves])
    assert seen.interval(percentile) is None
    for step, committed in zip(steps.tolist(), times.tolist(), strict=True):
        seen.commits.append(SaveRecord(step, committed - 0.5, committed))
    interval = seen.interval(percentile)
    assert interval.steps == pytest.approx(np.percentile(np.diff(steps), percentile))
    assert interval.seconds == pytest.approx(np.percentile(np.diff(times), percentile))
    assert seen.committed == len(moves)
    assert [record.step for record in seen.commits] == steps.tolist()


def test_a_long_run_keeps_its_percentiles_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(stats, "INTERVALS", 1000)
    monkeypatch.setattr(stats, "NEWEST_COMMITS", 10)
    commits, step = Commits(), 0
    for count in range(20_000):
        step += 1 + count % 100
        if count == 100:
            step += 10_000  # once, long ago
        commits.append(SaveRecord(step, step / 2, step / 2))
    assert len(commits) == 20_000
    assert [record.step for record in commits][-1] == step
    assert len(list(commits)) == 10
    assert len(commits._sample) == 1000
    for percentile in (10, 50, 90):
        interval = commits.interval(percentile)
        assert interval.steps == pytest.approx(percentile, abs=5), "as of all, not of the newest or the oldest"
        assert interval.seconds == interval.steps / 2
    assert commits.interval(100) == (10_001, 5000.5), "the longest is never forgotten"


def test_the_share_of_time_that_saves_held_training():
    seen = SaveStats(safe_since=100.0)
    assert seen.blocked_share(100.0) == 0
    seen.blocked_seconds += 3
    assert seen.blocked_share(130.0) == pytest.approx(0.1)
    seen.safe_since = 120.0  # a commit does not begin the run anew
    assert seen.blocked_share(130.0) == pytest.approx(0.1)
    assert seen.work_at_risk_seconds(130.0) == 10
    assert seen.work_at_risk_seconds(119.0) == 0


@settings(deadline=None)
@given(st.integers(5, 50), st.integers(5, 50), SECONDS, st.floats(0, 10))
def test_the_share_of_time_that_steps_were_longer_beside_a_save(saving, quiet, seconds, slower):
    seen = SaveStats(safe_since=0.0)
    for count in range(max(saving, quiet)):
        if count < saving:
            seen.observe_step(seconds * (1 + slower), saving=True)
        if count < quiet:
            seen.observe_step(seconds, saving=False)
    without = (saving + quiet) * seconds
    extra = saving * seconds * slower
    assert seen.slow_down_share == pytest.approx(extra / (without + extra), abs=1e-9)


@pytest.mark.parametrize("saving", [True, False])
def test_there_is_no_slow_down_without_both_kinds_of_steps(saving):
    seen = SaveStats(safe_since=0.0)
    assert seen.slow_down_share is None
    for _ in range(9):
        seen.observe_step(1.0, saving=saving)
    assert seen.slow_down_share is None
