"""The watch between two saves: says once that the newest step has gone, and nothing else."""

import shutil
import threading

import pytest
from etils import epath

from maxlite.checkpoint import layout, watch


@pytest.fixture
def looking(tmp_path, monkeypatch):
    """`looking()` lets the watch look once, and returns when it has."""
    asked, go = threading.Semaphore(0), threading.Semaphore(0)
    committed = layout.is_committed
    made = watch.DirectoryWatch(epath.Path(tmp_path))

    class Turns:
        """In place of the event that the watch waits on between two looks."""

        closed = False

        def wait(self, seconds):
            asked.release()
            assert go.acquire(timeout=30)
            return self.closed

        def set(self):
            self.closed = True
            go.release()

    made._closed = Turns()

    def look(says=committed):
        monkeypatch.setattr(layout, "is_committed", says)
        go.release()
        assert asked.acquire(timeout=30)
        return made.problem()

    made.start()
    assert asked.acquire(timeout=30)
    yield made, look
    made.close()


@pytest.fixture
def step(tmp_path):
    step = epath.Path(tmp_path) / "5"
    step.mkdir()
    (step / layout.COMMIT_MARKER).write_text("committed")
    return step


def test_nothing_is_said_of_a_step_that_is_there_or_when_none_is_expected(looking, step):
    watched, look = looking
    assert look() is None
    watched.expect(5)
    assert look() is None


def test_a_step_that_has_gone_is_said_once(looking, step):
    watched, look = looking
    watched.expect(5)
    shutil.rmtree(step)
    assert look() == (f"checkpoint {step} has vanished", None)
    assert watched.problem() is None
    assert look() is None


def test_a_newer_step_replaces_the_older_one(looking, step):
    watched, look = looking
    watched.expect(4)
    watched.expect(5)
    assert look() is None


def test_trouble_on_the_way_to_storage_says_nothing(looking, step):
    def refuse(path):
        raise OSError(5, "Input/output error")

    watched, look = looking
    watched.expect(5)
    assert look(refuse) is None
    shutil.rmtree(step)
    assert look() == (f"checkpoint {step} has vanished", None)
    assert look() is None


def test_a_step_committed_during_the_look_is_not_mistaken(looking, step):
    watched, look = looking
    watched.expect(4)

    def commit_meanwhile(path):
        watched.expect(5)
        return False  # 4 was deleted, as 5 was committed

    assert look(commit_meanwhile) is None
    assert look() is None
