"""Saves of several processes, each of them a thread here: all commit, or all fail at once in the same words."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import pytest

from maxlite.checkpoint import Checkpointer, Peers, SaveError
from maxlite.config import CheckpointConfig

STATE = {"w": jnp.zeros(3), "n": jnp.int32(1)}


@pytest.fixture
def run(tmp_path, store, storage, clock):
    """`run(part)` runs `part(checkpointer)` as every process; `run.lines` is what each reported."""
    run_lines = [[], [], []]
    config = CheckpointConfig(checkpoint_timeout_seconds=60)
    everyone = [
        Checkpointer(tmp_path, config, peers=Peers(index, 3, store), clock=clock, report=lines.append)
        for index, lines in enumerate(run_lines)
    ]
    with ThreadPoolExecutor(3) as pool:

        def run(part):
            return list(pool.map(part, everyone))

        run.lines = run_lines
        yield run
        run(lambda checkpointer: checkpointer.close())


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def save(step, storage=None):
    """Saves; with `storage`, no write ends (well or not) before every process has started its own."""
    started = threading.Barrier(3)
    if storage is not None:
        storage.gate.clear()

    def part(checkpointer):
        checkpointer.save(step, STATE)
        started.wait(30)
        if storage is not None:
            storage.gate.set()
        checkpointer.wait()
        return checkpointer.stats.last_committed_step, checkpointer.stats.failed

    return part


def test_all_know_a_step_to_be_committed_that_one_commits(run, tmp_path):
    assert run(save(1)) == [(1, 0)] * 3
    assert run(save(2)) == [(2, 0)] * 3
    assert names(tmp_path) == ["1", "2"]
    assert run.lines == [[], [], []]


def test_a_write_that_fails_on_one_fails_the_save_on_all_and_all_retry(run, tmp_path, storage):
    run(save(1))
    storage.faults = [OSError(28, "No space left on device")]
    assert run(save(2, storage)) == [(1, 1)] * 3
    for lines in run.lines:
        assert len(lines) == 1
        assert "save of step 2 failed, next try in 1 s or later: " in lines[0]
        assert "No space left on device; step 1 is the newest saved" in lines[0]
    assert sum("process " in lines[0] for lines in run.lines) == 2  # whose it was, in the words of the others
    assert names(tmp_path) == ["1"]
    assert run(save(2)) == [(2, 1)] * 3
    assert names(tmp_path) == ["1", "2"]


def test_a_commit_that_fails_fails_the_save_on_all(run, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("maxlite.checkpoint.storage.commit", refuse)
        assert run(save(1)) == [(None, 1)] * 3
    assert all("Input/output error; nothing is saved yet" in lines[0] for lines in run.lines)
    assert names(tmp_path) == []
    assert run(save(1)) == [(1, 1)] * 3


def test_the_last_save_is_committed_or_raises_on_all(run, tmp_path, storage):
    storage.faults = [OSError(28, "No space left on device")] * 6

    def final(checkpointer):
        with pytest.raises(SaveError, match=r"step 3, is not saved in "):
            checkpointer.save_final(3, STATE)

    run(final)
    storage.faults = []
    run(save(3))
    assert names(tmp_path) == ["3"]
