"""What Orbax prints is dropped while maxlite reads or writes with it, and nothing else is, nor at any other time."""

import logging
import sys
from types import SimpleNamespace

import orbax.checkpoint as ocp
import pytest

from maxlite.checkpoint import orbax_io


@pytest.fixture
def heard():
    """The records that came through, of the loggers that Orbax's noise goes to."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addHandler(handler)
    yield records
    for name in ("absl", "asyncio"):
        logging.getLogger(name).removeHandler(handler)


@pytest.fixture
def absl(heard):
    """Logs a record as a source file would; what came through."""

    def log(path, level=logging.ERROR):
        logger = logging.getLogger("absl")
        logger.handle(logger.makeRecord("absl", level, path, 1, path, (), None))
        return [record.getMessage() for record in heard]

    return log


def raised_in(path):
    """The `exc_info` of an error raised in a source file."""
    try:
        exec(compile("raise OSError('late')", path, "exec"))
    except OSError:
        return sys.exc_info()


@pytest.fixture
def asyncio_log(heard):
    """Logs what asyncio does of a task that failed in a source file unasked; how many records came through."""

    def log(path, message="Task exception was never retrieved\nfuture: <...>"):
        logging.getLogger("asyncio").error(message, exc_info=raised_in(path))
        return len(heard)

    return log


@pytest.fixture
def hook(monkeypatch):
    """The hook of a program in which nothing failed yet; what it was given."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    quiet = orbax_io._Quiet()
    monkeypatch.setattr(orbax_io, "quiet", quiet)
    # Another test's checkpointer may have been left open, or have failed.
    kept = {name: logging.getLogger(name).filters[:] for name in ("absl", "asyncio")}
    for name in kept:
        logging.getLogger(name).filters.clear()
    yield seen
    for name, filters in kept.items():
        logging.getLogger(name).filters[:] = filters


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


def test_late_failure_of_a_part_is_dropped_while_open_and_after_a_failure(asyncio_log, hook):
    assert asyncio_log(ocp.__file__) == 1
    with orbax_io.quiet:
        assert asyncio_log(ocp.__file__) == 1
        assert asyncio_log("/home/me/orbax/mine.py") == 2
        assert asyncio_log(ocp.__file__, "something else") == 3
    assert asyncio_log(ocp.__file__) == 4  # all went well
    with pytest.raises(OSError, match="failed"), orbax_io.quiet:
        raise OSError("failed")
    assert asyncio_log(ocp.__file__) == 4
    assert asyncio_log("/home/me/orbax/mine.py") == 5


def test_hook_that_someone_sets_meanwhile_stays(hook, monkeypatch):
    with orbax_io.quiet:
        ours = sys.unraisablehook
        monkeypatch.setattr(sys, "unraisablehook", ours_wrapped := lambda unraisable: ours(unraisable))
    assert sys.unraisablehook is ours_wrapped
    sys.unraisablehook(LATE_WRITE)
    assert hook == [LATE_WRITE]
