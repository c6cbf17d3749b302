"""What Orbax prints is dropped while maxlite reads or writes with it, and nothing else is, nor at any other time."""

import logging
import sys
from types import SimpleNamespace

import orbax.checkpoint as ocp
import pytest

from maxlite.checkpoint import orbax_io


@pytest.fixture
def absl():
    """Logs a record as a source file would; what came through."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("absl")
    logger.addHandler(handler)

    def log(path, level=logging.ERROR):
        logger.handle(logger.makeRecord("absl", level, path, 1, path, (), None))
        return lines

    yield log
    logger.removeHandler(handler)


@pytest.fixture
def hook(monkeypatch):
    """The hook of a program in which nothing failed yet; what it was given."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    monkeypatch.setattr(orbax_io, "quiet", orbax_io._Quiet())
    return seen


LATE_WRITE = SimpleNamespace(object=None, exc_value=RuntimeError("Event loop is closed"))
OTHER = SimpleNamespace(object=None, exc_value=RuntimeError("something else"))


def test_importing_and_having_saved_leaves_the_log_and_the_hook_alone(make, toy, absl, hook):
    before = sys.unraisablehook
    with make() as checkpointer:
        checkpointer.save(1, toy.after(1))
        assert sys.unraisablehook != before
    with make() as checkpointer:
        checkpointer.restore_or_init(toy.abstract(), toy.init)
    assert sys.unraisablehook == before
    assert absl(ocp.__file__) == [ocp.__file__]


def test_only_orbax_is_dropped(absl, hook):
    other = "/home/me/orbax/mine.py"
    with orbax_io.quiet, orbax_io.quiet:
        absl(ocp.__file__)
        assert absl(other) == [other]
        assert absl(ocp.__file__, logging.CRITICAL) == [other, ocp.__file__]
        sys.unraisablehook(LATE_WRITE)
        sys.unraisablehook(OTHER)
    assert hook == [OTHER]


def test_after_a_failure_only_the_hook_stays(absl, hook):
    with pytest.raises(OSError, match="failed"), orbax_io.quiet:
        raise OSError("failed")
    with orbax_io.quiet:
        pass
    sys.unraisablehook(LATE_WRITE)
    sys.unraisablehook(OTHER)
    assert hook == [OTHER]
    assert absl(ocp.__file__) == [ocp.__file__]


def test_hook_that_someone_sets_meanwhile_stays(hook, monkeypatch):
    with orbax_io.quiet:
        ours = sys.unraisablehook
        monkeypatch.setattr(sys, "unraisablehook", ours_wrapped := lambda unraisable: ours(unraisable))
    assert sys.unraisablehook is ours_wrapped
    sys.unraisablehook(LATE_WRITE)
    assert hook == [LATE_WRITE]
