import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from maxlite.checkpoint import start
from maxlite.checkpoint.peers import Peers
from maxlite.checkpoint.trial import look_for_room, scratch_directory


def alone(topic, finding):
    return [finding]


class Together:
    """Several processes as threads, with what each finds given to all."""

    def __init__(self, count):
        self.count = count
        self._barrier = threading.Barrier(count)
        self._found = [None] * count

    def run(self, job):
        """`job(peers, ask)` as every process: what each returned."""

        def one(index):
            def ask(topic, finding):
                self._barrier.wait()
                self._found[index] = dict(finding)
                self._barrier.wait()
                return list(self._found)

            return job(Peers(index, self.count), ask)

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(one, range(self.count)))


def errors(found):
    return [finding.get("error") for finding in found]


def test_it_is_there_and_then_gone_with_the_parents_that_it_was_given(tmp_path):
    with scratch_directory(tmp_path / "runs" / "r" / "checkpoints", Peers(), alone) as (path, found):
        assert path.is_dir()
        assert errors(found) == [None]
    assert not list(tmp_path.iterdir())


def test_what_else_is_there_stays_but_for_what_a_killed_one_left(tmp_path):
    (tmp_path / "10").mkdir()
    (tmp_path / ".preflight-left" / "x").mkdir(parents=True)
    with scratch_directory(tmp_path, Peers(), alone):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["10"]


def test_it_is_gone_after_an_error_too(tmp_path):
    with pytest.raises(KeyboardInterrupt), scratch_directory(tmp_path / "runs", Peers(), alone):
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_made_is_an_error_in_words(tmp_path):
    (tmp_path / "runs").touch()
    with scratch_directory(tmp_path / "runs" / "r", Peers(), alone) as (_, found):
        assert errors(found) == [f"{tmp_path}/runs/r cannot be used: Not a directory: {tmp_path}/runs/r"]


def test_several_see_each_other_there(tmp_path):
    def job(peers, ask):
        with scratch_directory(tmp_path / "runs", peers, ask) as (path, found):
            there = sorted(file.name for file in path.iterdir())
            return path, errors(found), there

    results = Together(3).run(job)
    assert results[0][1:] == ([None] * 3, ["seen-0", "seen-1", "seen-2"])
    assert results == [results[0]] * 3
    assert not list(tmp_path.iterdir())


def test_what_one_removes_last_is_not_removed_under_its_hands(tmp_path):
    def job(peers, ask):
        with scratch_directory(tmp_path, peers, ask) as (path, _):
            file = path / f"file-{peers.index}"
            file.touch()
            if not peers.primary:
                time.sleep(0.05)  # the primary is faster
            file.unlink()

    Together(3).run(job)
    assert not list(tmp_path.iterdir())


def test_one_whose_directory_is_another_says_so_to_all(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "SHARED_SECONDS", 0.0)

    def job(peers, ask):
        with scratch_directory(tmp_path / ("other" if peers.index == 2 else "runs"), peers, ask) as (_, found):
            return errors(found)

    say = f"{tmp_path}/other is not shared: this process does not see what process 0 wrote there"
    assert Together(3).run(job) == [[None, None, say]] * 3
    assert not list(tmp_path.iterdir())


def test_room_counts_the_committed_steps_of_the_run(tmp_path):
    for step, marked in ((10, True), (20, False)):
        directory = tmp_path / str(step) / "state"
        directory.mkdir(parents=True)
        (directory / "x").write_bytes(bytes(1000))
        if marked:
            (tmp_path / str(step) / "commit_success.txt").write_text("committed")
    room = look_for_room(tmp_path)
    assert room.own == 1000 + len("committed")
    assert room.free > 0
