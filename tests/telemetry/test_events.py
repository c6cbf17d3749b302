"""`events.jsonl`: whole after any cut, one line an event from any thread, and never in the way of training."""

import errno
import json
import os
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.telemetry import events
from maxlite.telemetry.events import EventsFile, read_events

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.text(min_size=1).filter(lambda name: name not in ("self", "kind", "time", "event"))


@settings(deadline=None)
@given(st.lists(st.dictionaries(NAMES, VALUES, max_size=3), max_size=5))
def test_events_read_back_as_they_were_recorded(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("e") / "events.jsonl"
    times = iter(range(100))
    for fields in records:  # every start of a run goes on with the file
        with EventsFile(path, report=pytest.fail, clock=lambda: next(times)) as file:
            file.record("save", **fields)
    expected = [{"time": at, "event": "save", **fields} for at, fields in enumerate(records)]
    assert (read_events(path) if records else []) == expected


def test_numbers_that_are_not_finite_become_null(tmp_path):
    with EventsFile(tmp_path / "e", clock=lambda: 1.5) as file:
        file.record("save", rate=float("inf"), nested={"losses": [1.0, float("nan")]})
    line = '{"time": 1.5, "event": "save", "rate": null, "nested": {"losses": [1.0, null]}}\n'
    assert (tmp_path / "e").read_text() == line


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 300))
def test_a_torn_last_line_is_passed_over_and_cut_off(tmp_path_factory, torn, block):
    path = tmp_path_factory.mktemp("e") / "events.jsonl"
    with EventsFile(path) as file:
        for step in range(6):
            file.record("save", step=step, words="x" * 10 * step)
    lines = path.read_bytes().splitlines(keepends=True)
    left = b"".join(lines)[: max(0, sum(map(len, lines)) - torn)]
    path.write_bytes(left)
    whole = [json.loads(line) for line in left.splitlines(keepends=True) if line.endswith(b"\n")]
    assert read_events(path) == whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "BLOCK_BYTES", block)
        with EventsFile(path, clock=lambda: 2.0) as file:
            file.record("resume")
    assert read_events(path) == [*whole, {"time": 2.0, "event": "resume"}]
    assert path.read_bytes().count(b"\n") == len(whole) + 1, "the torn line is gone"


def test_a_killed_process_leaves_every_event_that_it_recorded(tmp_path):
    program = (
        "import os, signal, sys; from pathlib import Path; from maxlite.telemetry.events import EventsFile\n"
        "file = EventsFile(Path(sys.argv[1]))\n"
        "for step in range(50): file.record('save', step=step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program, tmp_path / "e"], check=False).returncode == -9
    assert [event["step"] for event in read_events(tmp_path / "e")] == list(range(50))


def test_threads_do_not_write_into_each_others_lines(tmp_path, monkeypatch):
    pwrite = os.pwrite  # a few bytes at a time, so that lines would mix if they could
    monkeypatch.setattr("os.pwrite", lambda descriptor, data, at: pwrite(descriptor, data[:7], at))
    with EventsFile(tmp_path / "e") as file:

        def work(name):
            for count in range(50):
                file.record("save", thread=name, count=count)

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = [(event["thread"], event["count"]) for event in read_events(tmp_path / "e")]
    assert sorted(found) == [(name, count) for name in range(4) for count in range(50)]
    for name in range(4):
        assert [count for thread, count in found if thread == name] == list(range(50))


def test_a_full_disk_is_said_once_and_the_file_is_whole_when_there_is_room_again(tmp_path, monkeypatch):
    pwrite, room = os.pwrite, [12]

    def filling(descriptor, data, at):
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = pwrite(descriptor, data[: room[0]], at)
        room[0] -= written
        return written

    lines = []
    with EventsFile(tmp_path / "events.jsonl", report=lines.append) as file:
        file.record("first")
        with monkeypatch.context() as patch:
            patch.setattr("os.pwrite", filling)
            file.record("a long one", words="x" * 100)
            file.record("another")
        file.record("last")
    assert lines == ["events.jsonl cannot be written (No space left on device); training goes on without it"]
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")] == ["first", "last"]
    assert (tmp_path / "events.jsonl").read_bytes().count(b"\n") == 2


def test_a_place_that_cannot_be_written_is_said_once(tmp_path):
    (tmp_path / "events.jsonl").mkdir()
    lines = []
    with EventsFile(tmp_path / "events.jsonl", report=lines.append) as file:
        file.record("first")
        file.record("second")
    assert len(lines) == 1
    assert "Is a directory" in lines[0]


def test_events_after_the_end_are_lost_and_harm_nothing(tmp_path):
    file = EventsFile(tmp_path / "e", report=pytest.fail)
    file.record("first")
    file.close()
    with (tmp_path / "other").open("wb") as other:  # likely has the number that the closed file had
        file.record("late")
        file.close()
        other.write(b"kept")
    assert (tmp_path / "other").read_bytes() == b"kept"
    assert [event["event"] for event in read_events(tmp_path / "e")] == ["first"]
