import itertools
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxlite.checkpoint import probe
from maxlite.checkpoint.probe import ScratchFiles

CHUNK = 1000


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(probe, "CHUNK_BYTES", CHUNK)


def quiet(what, done, seconds):
    pass


@given(size=st.integers(0, 20 * CHUNK * probe.CHUNKS_PER_SYNC))
def test_every_byte_is_written_and_read_and_then_gone(tmp_path_factory, size):
    directory = tmp_path_factory.mktemp("disk")
    with ScratchFiles(directory, "process-0", size, quiet) as files:
        assert files.write().bytes == size
        assert sum(file.stat().st_size for file in directory.iterdir()) == size
        assert files.read().bytes == size
    assert not list(directory.iterdir())


def test_processes_do_not_meet(tmp_path):
    with (
        ScratchFiles(tmp_path, "process-1", 5000, quiet) as one,
        ScratchFiles(tmp_path, "process-11", 5000, quiet) as other,
    ):
        assert one.write().bytes == other.write().bytes == one.read().bytes == other.read().bytes == 5000


def test_a_flipped_bit_is_noticed(tmp_path):
    with ScratchFiles(tmp_path, "x", 50 * CHUNK, quiet) as files:
        files.write()
        file = sorted(tmp_path.iterdir())[2]
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        with pytest.raises(OSError, match=f"{file} is read back otherwise than it was written"):
            files.read()


def test_slow_storage_is_not_waited_for(tmp_path):
    seconds = itertools.count(0.0, 10.0)
    size = 100 * CHUNK * probe.CHUNKS_PER_SYNC
    with ScratchFiles(tmp_path, "x", size, quiet, clock=lambda: next(seconds)) as files:
        written = files.write()
        assert 0 < written.bytes < size
        assert written.seconds > probe.LONGEST_SECONDS
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) == written.bytes


def test_nothing_stays_of_a_disk_that_is_full(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), ScratchFiles(tmp_path, "x", 50 * CHUNK, quiet) as files:
        files.write()
    assert not list(tmp_path.iterdir())


def test_nothing_stays_of_an_interrupted_one_and_it_ends_at_once(tmp_path, monkeypatch):
    told = threading.Event()
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(told.wait()))

    def interrupt(what, done, seconds):
        assert what == "writing"
        told.set()
        raise KeyboardInterrupt

    size = 1000 * CHUNK * probe.CHUNKS_PER_SYNC
    with pytest.raises(KeyboardInterrupt), ScratchFiles(tmp_path, "x", size, interrupt) as files:
        files.write()
    assert not list(tmp_path.iterdir())
    assert len(synced) < 1000
