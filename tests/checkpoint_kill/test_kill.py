"""A run that is ended over and over loses nothing committed and ends bit for bit as the run that never stopped.

MAXLITE_KILLS=300 is the long mode; the default is 30.
"""

import os
import random
import re
import signal

import pytest

KILLS = int(os.environ.get("MAXLITE_KILLS", "30"))
RUNS = 3  # the kills are dealt to several runs, so that they go at the same time
TERMINATIONS = max(12, KILLS // 5)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(RUNS))
def test_a_run_killed_at_random_instants_is_the_run_never_killed(mortal, seed):
    instants, run, kills = random.Random(seed), mortal("killed"), KILLS // RUNS
    lives = []
    for kill in range(kills):
        if kill % 5 == 4:
            ready = at(instants.uniform(0, run.first_commit_seconds))  # imports, restore, compiling, first save
        else:
            ready = after_a_commit(run, instants.uniform(0, 0.5), while_saving=kill % 5 != 3)
        lives.append(run.live(signal.SIGKILL, ready))
    assert {life.status for life in lives} == {-signal.SIGKILL}
    saving = sum(life.saving for life in lives)
    print(f"{kills} kills, {saving} with a save in flight; {run.newest} steps; start {run.first_commit_seconds:.1f} s")
    assert saving > kills / 2, f"only {saving} of {kills} kills had a save in flight"
    must_end_as_the_run_never_stopped(run, mortal("whole"))


def test_a_run_terminated_at_random_instants_is_the_run_never_stopped(mortal, tmp_path):
    instants, run = random.Random(1), mortal("terminated")
    compiling = evaluating = 0
    for number in range(TERMINATIONS):
        arguments = []
        match number % 4:
            case 0:
                arguments = [f"jax_cache_dir={tmp_path / f'empty{number}'}"]
                ready = after_line(run, r"^compiling the train step$", instants.uniform(0, 0.3))
            case 1:
                ready = after_line(run, r"^step \d*[05]0/\d+  loss ", instants.uniform(0, 0.01))  # evaluating
            case 2:
                ready = at(instants.uniform(0, run.first_commit_seconds))
            case _:
                ready = after_a_commit(run, instants.uniform(0, 0.5))
        before = run.newest
        life = run.live(signal.SIGTERM, ready, *arguments)
        if life.status == -signal.SIGTERM:
            assert not life.output, life.output  # before the first line of maxlite: nobody was there to answer
        else:
            assert life.status == 5, life.output
        assert "Traceback" not in life.output
        assert not life.saving, "a save was left unfinished"
        if life.last_logged:
            assert life.newest > before, f"steps were trained and none of them was saved: {life.output}"
        compiling += life.was_compiling
        evaluating += life.cut_evaluation
    print(f"{TERMINATIONS} terminations, {compiling} compiling, {evaluating} evaluating; {run.newest} steps")
    assert compiling
    assert evaluating
    must_end_as_the_run_never_stopped(run, mortal("whole"))


def must_end_as_the_run_never_stopped(run, whole):
    last = run.newest + 20
    output = run.finish(last)
    assert re.search(rf"^resuming from step {run.newest} of {last}$", output, re.MULTILINE), output
    whole.finish(last)
    assert run.state(last) == whole.state(last)
    assert run.losses() == whole.losses()


def at(seconds):
    """Ready so many seconds after the start of the process."""
    return lambda moment: moment.seconds >= seconds


def after_a_commit(run, delay, while_saving=False):
    """Ready `delay` seconds after this life's first commit, and then not before a save is being written."""
    before, seen = run.newest, None

    def ready(moment):
        nonlocal seen
        if seen is None and moment.newest > before:
            seen = moment.seconds
        return seen is not None and moment.seconds >= seen + delay and (moment.saving or not while_saving)

    return ready


def after_line(run, pattern, delay):
    """Ready `delay` seconds after a line that matches was printed."""
    seen = None

    def ready(moment):
        nonlocal seen
        if seen is None and re.search(pattern, run.printed(), re.MULTILINE):
            seen = moment.seconds
        return seen is not None and moment.seconds >= seen + delay

    return ready
