"""The last moments of a run, and what a save that went wrong in its last moment leaves."""

import jax.numpy as jnp
import pytest

from maxlite.checkpoint import RestoreError, SaveError
from maxlite.checkpoint import storage as storage_module

STATE = {"w": jnp.zeros(3), "n": jnp.int32(1)}


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def save(checkpointer, step):
    checkpointer.save(step, STATE)
    checkpointer.wait()


@pytest.mark.parametrize("steps", [[4], [4, 6]])
def test_steps_that_all_lost_their_marker_are_not_started_over(make, storage, steps):
    with make() as checkpointer:
        for step in steps:
            save(checkpointer, step)
    for step in steps:
        (make.directory / str(step) / "commit_success.txt").unlink()
    before = names(make.directory)
    with make() as checkpointer, pytest.raises(RestoreError, match=r"is damaged; nothing was changed\. step"):
        checkpointer.restore_or_init(STATE, lambda: STATE)
    assert names(make.directory) == before


def test_one_damaged_old_step_does_not_keep_the_others_from_being_deleted(make, storage):
    with make(max_num_checkpoints_to_keep=2) as checkpointer:
        save(checkpointer, 1)
    (make.directory / "1" / "metadata" / "metadata.json").unlink()
    with make(max_num_checkpoints_to_keep=2) as checkpointer:
        for step in (2, 3, 4):
            save(checkpointer, step)
    assert names(make.directory) == ["3", "4"]
    assert not make.lines


def test_the_step_that_was_being_written_is_enough_when_another_does_not_fit_the_grace(make, storage, clock):
    with make() as checkpointer:
        storage.gate.clear()
        checkpointer.save(1, STATE)
        clock.now += 30  # what a save takes is known once this one is committed
        storage.gate.set()
        assert checkpointer.save_preempted(9, STATE, 20.0) == 1
    assert names(make.directory) == ["1"]


def test_the_newest_step_is_saved_too_where_it_fits_and_is_worth_it(make, storage, clock):
    with make() as checkpointer:
        checkpointer.save(1, STATE)
        checkpointer.poll()
        assert checkpointer.save_preempted(9, STATE, 20.0, {"loss": 2.5}) == 1  # no work since then
        clock.now += 30
        assert checkpointer.save_preempted(9, STATE, 20.0) == 9


def test_a_second_save_that_fails_leaves_the_first_one_safe(make, storage, clock):
    with make() as checkpointer:
        save(checkpointer, 1)
        storage.gate.clear()
        checkpointer.save(5, STATE)
        clock.now += 1
        storage.gate.set()
        checkpointer._saves.pending.result.wait(30)
        clock.now += 5
        storage.faults = [OSError(28, "No space left on device")]
        assert checkpointer.save_preempted(9, STATE, 20.0) == 5


def test_nothing_saved_within_the_grace_is_an_error(make, storage):
    with make() as checkpointer:
        storage.faults = [OSError(28, "No space left on device")]
        with pytest.raises(SaveError, match="step 9 is not saved within preemption_grace_seconds: No space left"):
            checkpointer.save_preempted(9, STATE, 20.0)


@pytest.mark.parametrize("on_save_failure", ["keep_training", "stop"])
def test_a_run_whose_newest_save_failed_does_not_end_well(make, storage, on_save_failure):
    with make(on_save_failure=on_save_failure) as checkpointer:
        save(checkpointer, 1)
        checkpointer.require_saved()
        storage.faults = [OSError(28, "No space left on device")]
        checkpointer.save(2, STATE)
        with pytest.raises(SaveError, match="the last save failed: No space left on device; step 1 is the newest"):
            checkpointer.require_saved()
    assert len(make.lines) == 1


def test_a_step_committed_by_a_save_that_failed_in_its_last_moment_is_kept(make, storage, monkeypatch):
    commit = storage_module.commit

    def fails_after(temporary, step_dir):
        commit(temporary, step_dir)
        raise OSError(5, "Input/output error")

    with make() as checkpointer:
        monkeypatch.setattr(storage_module, "commit", fails_after)
        save(checkpointer, 7)
        assert checkpointer.stats.failed == 1
        (make.directory / "7" / "the first").touch()
        monkeypatch.setattr(storage_module, "commit", commit)
        save(checkpointer, 7)
        assert checkpointer.stats.last_committed_step == 7
    assert names(make.directory) == ["7"]
    assert (make.directory / "7" / "the first").exists()


def test_storage_that_does_not_answer_fails_the_save_and_holds_training_for_a_bounded_time(make, storage, monkeypatch):
    import threading

    answers = threading.Event()
    monkeypatch.setattr("maxlite.checkpoint.saving.STORAGE_SECONDS", 0.05)
    monkeypatch.setattr("maxlite.checkpoint.storage.free_bytes", lambda directory: answers.wait(30) or None)
    make.directory.mkdir()
    with make() as checkpointer:
        save(checkpointer, 1)
        assert "did not answer within 0.05 s" in checkpointer.stats.last_failure
        answers.set()
        monkeypatch.undo()


def test_a_resumed_run_watches_the_step_that_it_came_from(make, storage):
    with make() as checkpointer:
        save(checkpointer, 3)
    with make() as checkpointer:
        checkpointer.restore_or_init(STATE, lambda: STATE)
        assert checkpointer._watch._expected == 3
        checkpointer._saves._lost("checkpoint 3 has vanished", None)
        assert checkpointer.stats.last_committed_step is None
        assert make.lines == ["checkpoint 3 has vanished; saving again; nothing is saved yet"]


def test_old_steps_go_however_rarely_anybody_looks(make, storage):
    with make(max_num_checkpoints_to_keep=1) as checkpointer:
        for step in range(1, 30):
            checkpointer.save(step, STATE)
        assert len(names(make.directory)) < 10  # the newest few, while the one before is being deleted
    assert names(make.directory) == ["29"]
