"""What the Checkpointer does with its decisions, on storage that obeys the test."""

import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maxlite.checkpoint import Checkpointer, SaveError
from maxlite.config import CheckpointConfig, InputError

STATE = {"w": jnp.zeros(3), "n": jnp.int32(1)}
BAD = {"w": jnp.array([0.0, -0.0, 0.0])}  # equal to a comparison of numbers
CONTINUOUS = {"enable_continuous_checkpointing": True}


def steps_on_disk(directory):
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


def settle(checkpointer):
    """Waits for the background thread without telling the checkpointer."""
    if checkpointer._saves.pending is not None:
        checkpointer._saves.pending.result.exception(30)


def test_continuous_starts_a_save_when_the_last_is_committed(make, storage, clock):
    with make(**CONTINUOUS, continuous_checkpointing_minimum_interval_secs=10) as checkpointer:
        storage.gate.clear()
        assert checkpointer.maybe_save(1, STATE)
        clock.now += 50
        assert not checkpointer.maybe_save(2, STATE)  # still being written
        storage.gate.set()
        settle(checkpointer)
        assert checkpointer.maybe_save(3, STATE)
        settle(checkpointer)
        clock.now += 9
        assert not checkpointer.maybe_save(4, STATE)  # within the minimum interval
        assert checkpointer.stats.last_committed_step == 3
        clock.now += 1
        assert checkpointer.maybe_save(5, STATE)
    assert storage.most_writing == 1
    assert checkpointer.stats.committed == 3


def test_fixed_save_due_during_a_write_starts_after_it_and_blocks_nothing(make, storage):
    with make(checkpoint_period=2) as checkpointer:
        storage.gate.clear()
        assert [checkpointer.maybe_save(step, STATE) for step in range(1, 6)] == [False, True, False, False, False]
        storage.gate.set()
        settle(checkpointer)
        assert checkpointer.maybe_save(7, STATE)
        assert not checkpointer.maybe_save(7, STATE)


def test_saves_are_synchronous_when_asked(make, storage):
    with make(async_checkpointing=False, checkpoint_period=1) as checkpointer:
        assert checkpointer.maybe_save(1, STATE)
        assert checkpointer.stats.last_committed_step == 1
        storage.faults = [OSError(28, "No space left on device")]
        assert not checkpointer.maybe_save(2, STATE)
        assert checkpointer.stats.last_committed_step == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    plan=st.lists(st.tuples(st.booleans(), st.sampled_from(["fine", "fault"])), min_size=1, max_size=12),
    keep=st.integers(1, 4),
    data=st.data(),
)
def test_newest_commit_always_stays_and_the_final_state_is_always_committed(
    plan, keep, data, tmp_path_factory, storage
):
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    now, lines = [0.0], []
    config = CheckpointConfig(**CONTINUOUS, max_num_checkpoints_to_keep=keep, checkpoint_timeout_seconds=60)
    storage.writing = storage.most_writing = 0
    committed = []
    with Checkpointer(directory, config, clock=lambda: now[0], report=lines.append) as checkpointer:
        for step, (wait, fate) in enumerate(plan, start=1):
            now[0] += data.draw(st.sampled_from([0.1, 100]))
            storage.faults = [ValueError("RESOURCE_EXHAUSTED: disk full")] if fate == "fault" else []
            started = checkpointer.maybe_save(step, STATE)
            settle(checkpointer)  # or the fate of this write would not be settled
            if wait:
                checkpointer.wait()
            if started and fate == "fine":
                committed.append(step)
            assert set(committed[-keep:]) <= set(steps_on_disk(directory))  # older ones go a moment later
            if wait:
                assert steps_on_disk(directory) == committed[-keep:]
        storage.faults = []
        checkpointer.save_final(len(plan) + 1, STATE)
    committed.append(len(plan) + 1)
    assert steps_on_disk(directory) == committed[-keep:]
    assert storage.most_writing == 1
    assert [commit.step for commit in checkpointer.stats.commits] == committed
    assert len(lines) == checkpointer.stats.failed  # each failure is reported, once
    assert not [path for path in directory.iterdir() if "tmp" in path.name]


def test_background_failure_is_noticed_reported_once_and_retried(make, storage, clock):
    with make(checkpoint_period=10) as checkpointer:
        checkpointer.save(10, STATE)
        settle(checkpointer)
        checkpointer.poll()
        storage.faults = [ValueError("RESOURCE_EXHAUSTED: disk full [tensorstore_spec=...]")]
        checkpointer.save(20, STATE)
        settle(checkpointer)
        assert not checkpointer.maybe_save(21, STATE)  # noticed here, at the next step
        assert checkpointer.stats.failed == 1
        assert checkpointer.stats.last_committed_step == 10
        assert len(make.lines) == 1
        assert "save of step 20 failed" in make.lines[0]
        assert "disk full" in make.lines[0]
        assert "tensorstore_spec" not in make.lines[0]
        clock.now += 1
        assert checkpointer.maybe_save(22, STATE)
    assert len(make.lines) == 1
    assert steps_on_disk(make.directory) == [10, 22]
    assert [kind for kind, _ in make.events] == ["save", "save_failed", "save"]


def test_write_that_hangs_is_given_up_and_never_commits(make, storage, clock):
    storage.gate.clear()
    checkpointer = make(**CONTINUOUS, max_num_checkpoints_to_keep=1)
    checkpointer.save(1, STATE)
    hung = checkpointer._saves.pending.result
    clock.now += 9
    checkpointer.poll()
    assert not make.lines
    clock.now += 51
    checkpointer.poll()
    assert make.lines == ["save of step 1 is late: not committed after 60 s; training goes on"]
    clock.now += 11
    checkpointer.poll()
    assert "save of step 1 failed" in make.lines[1]
    assert "71 s" in make.lines[1]
    storage.gate.set()
    assert hung.exception(30) is not None
    assert not list(make.directory.iterdir())
    assert checkpointer.stats.last_committed_step is None
    clock.now += 1
    checkpointer.save_final(2, STATE)
    checkpointer.close()
    assert steps_on_disk(make.directory) == [2]


def test_late_failure_of_a_write_given_up_leaves_the_retry_alone(make, storage, clock):
    storage.gate.clear()
    checkpointer = make(**CONTINUOUS)
    checkpointer.save(1, STATE)
    hung = checkpointer._saves.pending.result
    clock.now += 71
    checkpointer.poll()
    storage.faults = [OSError("late")]
    retry = make.directory / "1.orbax-checkpoint-tmp-2" / "of the retry"
    retry.parent.mkdir()
    retry.write_text("")
    storage.gate.set()
    assert hung.exception(30) is not None
    assert retry.exists()
    checkpointer.close()


def test_final_save_waits_for_the_one_being_written_and_writes_a_step_once(make, storage):
    with make(**CONTINUOUS) as checkpointer:
        checkpointer.save(1, STATE)
        checkpointer.save_final(1, STATE)
        assert checkpointer.stats.committed == 1
        checkpointer.save_final(2, STATE)
    assert steps_on_disk(make.directory) == [1, 2]


def test_final_save_that_cannot_be_committed_raises(make, storage):
    with make() as checkpointer:
        storage.faults = [OSError(28, "No space left on device")] * 2
        with pytest.raises(SaveError, match=r"final state, step 5, is not saved .* No space left"):
            checkpointer.save_final(5, STATE)
        storage.faults = [OSError(28, "No space left on device")]
        checkpointer.save_final(6, STATE)
    assert steps_on_disk(make.directory) == [6]


def test_final_save_notices_a_commit_that_vanished(make, storage):
    with make() as checkpointer:
        checkpointer.save(5, STATE)
        checkpointer.wait()
        (make.directory / "5" / "commit_success.txt").unlink()
        checkpointer.save_final(5, STATE)
    assert (make.directory / "5" / "commit_success.txt").exists()
    assert (make.directory / "5.set-aside-1").exists()


def test_final_save_that_reads_back_otherwise_is_set_aside_and_saved_again(make, storage):
    storage.corruptions = [BAD]
    with make() as checkpointer:
        checkpointer.save_final(5, STATE)
        assert checkpointer.stats.last_committed_step == 5
    assert make.lines[0].endswith("5 is damaged: w: not the values that were saved (fingerprints differ)")
    assert (make.directory / "5.set-aside-1").exists()
    assert steps_on_disk(make.directory) == [5]


def test_final_save_that_never_reads_back_right_raises_and_leaves_no_bad_step(make, storage):
    with make() as checkpointer:
        checkpointer.save(4, STATE)
        storage.corruptions = [BAD] * 2
        with pytest.raises(SaveError, match=r"step 5, is not saved .*: w: not the values"):
            checkpointer.save_final(5, STATE)
    assert steps_on_disk(make.directory) == [4]


def test_final_save_that_cannot_be_read_back_now_raises_and_leaves_the_step(make, storage, monkeypatch):
    def refuse(path, abstract, config):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("maxlite.checkpoint.orbax_io.read_arrays", refuse)
    with (
        make() as checkpointer,
        pytest.raises(SaveError, match="step 5, is committed but not verified: "),
    ):
        checkpointer.save_final(5, STATE)
    assert steps_on_disk(make.directory) == [5]


def test_deletion_failure_is_a_warning_not_a_failed_save(make, storage, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("maxlite.checkpoint.storage.delete_step", refuse)
    with make(max_num_checkpoints_to_keep=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, STATE)
            checkpointer.wait()
        assert checkpointer.stats.committed == 2
        assert checkpointer.stats.failed == 0
    assert len(make.lines) == 1
    assert "checkpoint 1 could not be deleted: Permission denied" in make.lines[0]


def test_listing_failure_after_the_commit_is_a_warning_not_a_failed_save(make, storage, monkeypatch):
    def refuse(directory):
        raise OSError(5, "Input/output error", str(directory))

    monkeypatch.setattr("maxlite.checkpoint.layout.steps", refuse)  # only cleaning up lists the steps
    with make(max_num_checkpoints_to_keep=1) as checkpointer:
        checkpointer.save(1, STATE)
        checkpointer.wait()
        assert checkpointer.stats.last_committed_step == 1
        assert checkpointer.stats.failed == 0
    assert len(make.lines) == 1
    assert make.lines[0].startswith("no old checkpoint in ")
    assert "was deleted: Input/output error" in make.lines[0]


def test_statistics(make, storage, clock):
    with make() as checkpointer:
        assert checkpointer.stats.interval(50) is None
        for step, seconds in ((2, 10), (5, 20), (15, 70)):
            clock.now += seconds
            checkpointer.save(step, STATE)
            checkpointer.wait()
        clock.now += 3
        assert checkpointer.work_at_risk_seconds() == 3
        assert checkpointer.stats.interval(50) == (6.5, 45)
        assert checkpointer.stats.interval(0) == (3, 20)
        assert checkpointer.stats.blocked_seconds == 0


def test_work_at_risk_counts_from_when_the_state_was_taken(make, storage, clock):
    with make() as checkpointer:
        storage.gate.clear()
        checkpointer.save(1, STATE)
        clock.now += 30
        assert checkpointer.work_at_risk_seconds() == 30
        storage.gate.set()
        settle(checkpointer)
        clock.now += 5
        checkpointer.poll()
        assert checkpointer.work_at_risk_seconds() == 35


def test_disabled_checkpointing_touches_nothing(make, storage):
    with make(enable_checkpointing=False) as checkpointer:
        assert checkpointer.restore_or_init(STATE, lambda: STATE) == (STATE, 0)
        assert not checkpointer.maybe_save(1000, STATE)
        checkpointer.save_final(1000, STATE)
    assert not make.directory.exists()


def test_metadata_that_json_cannot_hold_fails_at_once(make):
    with pytest.raises(TypeError):
        make(metadata={"a": object()})


def test_directory_that_cannot_be_made_is_bad_input(make, tmp_path):
    (tmp_path / "file").write_text("")
    with make(tmp_path / "file" / "checkpoints") as checkpointer, pytest.raises(InputError, match="cannot be used"):
        checkpointer.restore_or_init(STATE, lambda: STATE)
