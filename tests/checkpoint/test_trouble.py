"""Restores when a good step cannot be read now: no older step may take its place."""

import errno
import json
import os

import jax
import pytest

from maxlite.checkpoint import RestoreError, faults, layout, orbax_io
from maxlite.checkpoint.faults import is_damage
from maxlite.config import InputError

TROUBLE = {
    "I/O error": OSError(errno.EIO, "Input/output error"),
    "no permission": PermissionError(errno.EACCES, "Permission denied"),
    "stale handle": OSError(errno.ESTALE, "Stale file handle"),
    "network": ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    "host memory": MemoryError("cannot allocate"),
    "device memory": jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes"),
    "TensorStore": ValueError("UNAVAILABLE: Error reading object"),
}


@pytest.fixture
def waits(monkeypatch):
    """The seconds waited between attempts; nothing sleeps."""
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    return waits


@pytest.fixture
def two_steps(make, toy):
    with make() as checkpointer:
        for step in (4, 6):
            checkpointer.save(step, toy.after(step))
    return make.directory


def restore(make, toy):
    with make() as checkpointer:
        return checkpointer.restore_or_init(toy.abstract(), toy.init)


def fail(monkeypatch, owner, name, error, times):
    """The first `times` calls of a function raise."""
    original, left = getattr(owner, name), [error] * times

    def function(*args, **keywords):
        if left:
            raise left.pop()
        return original(*args, **keywords)

    monkeypatch.setattr(owner, name, function)


@pytest.mark.parametrize("error", TROUBLE.values(), ids=TROUBLE.keys())
@pytest.mark.parametrize("place", [(layout, "steps"), (layout, "read_metadata"), (orbax_io, "read_arrays")])
def test_trouble_that_passes_is_waited_for(make, toy, same, two_steps, monkeypatch, waits, place, error):
    fail(monkeypatch, *place, error, times=2)
    state, step = restore(make, toy)
    assert step == 6
    same(state, toy.after(6))
    assert tuple(waits) == faults.RETRY_SECONDS
    assert len(make.lines) == 2
    assert all(faults.in_words(error) in line for line in make.lines)


@pytest.mark.parametrize("error", TROUBLE.values(), ids=TROUBLE.keys())
@pytest.mark.parametrize("place", [(layout, "steps"), (layout, "read_metadata"), (orbax_io, "read_arrays")])
def test_trouble_that_stays_ends_the_run(make, toy, two_steps, monkeypatch, waits, place, error):
    before = sorted(two_steps.rglob("*"))
    fail(monkeypatch, *place, error, times=3)
    with pytest.raises(RestoreError) as caught:
        restore(make, toy)
    assert str(two_steps if place[1] == "steps" else two_steps / "6") in str(caught.value)
    assert faults.in_words(error) in str(caught.value)
    assert sorted(two_steps.rglob("*")) == before


FILES = ["state/params.b/c/0", "state/_METADATA", "metadata/metadata.json", "integrity.json", "commit_success.txt"]


@pytest.mark.parametrize("file", FILES)
def test_file_that_cannot_be_opened_is_not_damage(make, toy, two_steps, waits, file):
    path = two_steps / "6" / file
    path.unlink()
    path.symlink_to(path.name)  # opening it fails for root too
    with pytest.raises(RestoreError, match="Too many levels of symbolic links"):
        restore(make, toy)
    assert tuple(waits) == faults.RETRY_SECONDS


def test_step_of_a_newer_format_is_refused(make, toy, two_steps):
    file = two_steps / "6" / "metadata" / "metadata.json"
    file.write_text(json.dumps({"format": layout.FORMAT + 1, "all": "else is new"}))
    (two_steps / "6" / "integrity.json").write_text(json.dumps({"so": "is the record"}))
    with pytest.raises(InputError, match=rf"6 has format {layout.FORMAT + 1}, .* reads format {layout.FORMAT}"):
        restore(make, toy)
    assert not make.lines


def test_damage_is_told_from_trouble_through_what_wraps_it():
    assert all(not is_damage(error) for error in TROUBLE.values())
    assert is_damage(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    assert is_damage(ValueError("DATA_LOSS: Error decoding manifest"))
    for cause, damage in ((ValueError("OUT_OF_RANGE: Requested byte range"), True), (TROUBLE["TensorStore"], False)):
        wrapped = Exception("Encountered error while reading array index")
        wrapped.__cause__ = cause
        assert is_damage(wrapped) == damage
