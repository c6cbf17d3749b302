"""Real write errors under Orbax: files that may not grow, a checkpoint directory that is gone."""

import resource
import shutil
from contextlib import contextmanager

import pytest

from maxlite.checkpoint import SaveError

CONTINUOUS = {"enable_continuous_checkpointing": True}


@contextmanager
def files_may_not_exceed(size):
    """Every write past `size` bytes fails, as on a full disk, for root too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_is_noticed_reported_once_cleaned_up_and_retried(make, toy, same, clock, capfd):
    with make(**CONTINUOUS) as checkpointer:
        checkpointer.save(1, toy.after(1))
        checkpointer.wait()
        with files_may_not_exceed(64 * 1024):
            assert checkpointer.maybe_save(2, toy.after(2))
            checkpointer._saves.pending.result.exception(60)
        assert not checkpointer.maybe_save(3, toy.after(3))
        assert checkpointer.stats.failed == 1
        assert checkpointer.stats.last_committed_step == 1
        assert [path.name for path in make.directory.iterdir()] == ["1"]
        assert len(make.lines) == 1
        assert make.lines[0].startswith("save of step 2 failed, next try in 1 s or later: ")
        assert "File too large" in make.lines[0]
        assert capfd.readouterr().err == ""
        clock.now += 1
        assert checkpointer.maybe_save(4, toy.after(4))
    with make() as checkpointer:
        state, step = checkpointer.restore_or_init(toy.abstract(), toy.init)
    assert step == 4
    same(state, toy.after(4))


def test_final_save_on_a_full_disk_raises_and_leaves_the_last_commit(make, toy, same):
    with make() as checkpointer:
        checkpointer.save(1, toy.after(1))
        checkpointer.wait()
        with files_may_not_exceed(64 * 1024), pytest.raises(SaveError, match=r"step 2, is not saved .*File too large"):
            checkpointer.save_final(2, toy.after(2))
        assert len(make.lines) == 1
        assert "save of step 2 failed, trying again at once: " in make.lines[0]
    with make() as checkpointer:
        state, step = checkpointer.restore_or_init(toy.abstract(), toy.init)
    assert step == 1
    same(state, toy.after(1))


def test_directory_replaced_by_a_file_then_back(make, toy, same, clock):
    with make(**CONTINUOUS) as checkpointer:
        checkpointer.restore_or_init(toy.abstract(), toy.init)
        shutil.rmtree(make.directory)
        make.directory.write_text("in the way")
        checkpointer.maybe_save(1, toy.after(1))
        if checkpointer._saves.pending is not None:
            checkpointer._saves.pending.result.exception(60)
        assert not checkpointer.maybe_save(2, toy.after(2))
        assert checkpointer.stats.failed == 1
        assert len(make.lines) == 1
        with pytest.raises(SaveError):
            checkpointer.save_final(3, toy.after(3))
        make.directory.unlink()
        checkpointer.save_final(3, toy.after(3))
    with make() as checkpointer:
        state, step = checkpointer.restore_or_init(toy.abstract(), toy.init)
    assert step == 3
    same(state, toy.after(3))
