"""`list`: every directory is what it is, and is good only as far as files can tell."""

import json
import shutil
import time

import pytest

from maxlite.checkpoint import integrity
from maxlite.checkpoint.inventory import State, survey
from maxlite.checkpoint.storage import absolute


def size(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_json_has_every_step_newest_first(run, cli_json):
    status, entries = cli_json("list", run.directory)
    assert status == 0
    assert [entry["step"] for entry in entries] == [30, 20, 10]
    for entry in entries:
        assert (entry["committed"], entry["verified"], entry["problem"], entry["state"]) == (
            True,
            True,
            None,
            "committed",
        )
        assert entry["bytes"] == size(run.step(entry["step"]))
        assert 0 < time.time() - entry["created"] < 3600
        assert entry["metrics"] == {"loss": 100 / entry["step"]}
    assert [entry["parent_step"] for entry in entries] == [20, 10, None]


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints/20"])
def test_path_may_be_the_checkpoints_or_one_step(run, cli_json, place):
    _, entries = cli_json("list", run.directory / place)
    assert [entry["step"] for entry in entries] == ([20] if place.endswith("20") else [30, 20, 10])


def test_table_shows_what_a_person_asks_for(run, cli):
    run.truncate(20)
    status, out, err = cli("list", run.directory)
    header, newest, damaged, oldest, _, total = out.splitlines()
    assert (status, err) == (0, "")
    assert header.split() == ["step", "age", "size", "commit", "files", "parent", "loss"]
    assert newest.split()[0] == "30"
    assert newest.split()[-4:] == ["committed", "right", "20", "3.3333"]
    assert "DAMAGED" in damaged
    assert " bytes instead of " in damaged
    assert oldest.split()[-3:] == ["committed", "right", "10.0000"]
    assert len(newest) == len(oldest)  # aligned
    assert total.startswith("3 checkpoints; 3.")
    assert total.endswith("in all; newest with all files right: step 30")


def test_what_is_no_checkpoint_is_marked_as_what_it_is(run, cli, cli_json):
    run.tear(30)
    for name in ("40.orbax-checkpoint-tmp-3", "5.deleting", "20.set-aside-1"):
        (run.checkpoints / name / "state").mkdir(parents=True)
        (run.checkpoints / name / "state" / "x").write_bytes(bytes(7))
    for name in ("notes", "050", "20.set-aside", "x.set-aside-1"):  # someone else's
        (run.checkpoints / name).mkdir()
    (run.checkpoints / "60").write_text("a file")
    status, entries = cli_json("list", run.directory)
    assert status == 0
    assert [(entry["step"], entry["state"]) for entry in entries] == [
        (40, "unfinished"),
        (30, "torn"),
        (20, "set aside"),
        (20, "committed"),
        (10, "committed"),
        (5, "being deleted"),
    ]
    assert [entry["step"] for entry in entries if entry["committed"]] == [20, 10]
    assert not any(entry["verified"] for entry in entries if not entry["committed"])
    assert entries[0]["bytes"] == 7
    _, out, _ = cli("list", run.directory)
    assert "40.orbax-checkpoint-tmp-3" in out
    assert "2 checkpoints; 4 other directories" in out


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: run.truncate(30), "bytes instead of"),
        (lambda run: run.big_file(30).unlink(), "is missing"),
        (lambda run: (run.step(30) / "integrity.json").unlink(), "no integrity record"),
        (lambda run: (run.step(30) / "metadata" / "metadata.json").write_text("{}"), "metadata.json has 2 bytes"),
        (lambda run: shutil.copytree(run.step(20), run.step(30), dirs_exist_ok=True), "instead of|differs|copy of"),
    ],
)
def test_damaged_files_are_named_and_the_others_still_listed(run, cli_json, damage, words):
    damage(run)
    status, (newest, *older) = cli_json("list", run.directory)
    assert status == 0
    assert (newest["step"], newest["committed"], newest["verified"]) == (30, True, False)
    assert any(word in newest["problem"] for word in words.split("|")), newest["problem"]
    assert all(entry["verified"] for entry in older)


def test_copy_under_another_name_is_not_verified(run, cli_json):
    shutil.copytree(run.step(20), run.step(50))
    _, entries = cli_json("list", run.step(50))
    assert [(entry["verified"], entry["problem"]) for entry in entries] == [
        (False, "it is a copy of step 20 under another name")
    ]


def test_flipped_bit_in_a_large_array_is_beyond_a_list(run, cli_json):
    run.flip(30)
    _, entries = cli_json("list", run.directory)
    assert all(entry["verified"] for entry in entries)


def test_step_of_a_newer_format_is_listed_with_what_to_do(run, cli_json):
    file = run.step(30) / "metadata" / "metadata.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    arrays = integrity.read(absolute(run.step(30))).arrays
    for name in ("integrity.json", "commit_success.txt"):
        (run.step(30) / name).unlink()
    integrity.write(absolute(run.step(30)), arrays)
    (run.step(30) / "commit_success.txt").touch()
    _, entries = cli_json("list", run.directory)
    assert [entry["verified"] for entry in entries] == [False, True, True]
    assert "use a newer maxlite" in entries[0]["problem"]


def test_metric_that_is_not_finite_is_null(run, cli, cli_json):
    file = run.step(30) / "metadata" / "metadata.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "metrics": {"loss": float("nan")}}))
    assert cli_json("list", run.directory)[1][0]["metrics"] == {"loss": None}
    assert cli_json("show", run.directory)[1]["metrics"] == {"loss": None}
    assert " nan " in cli("list", run.directory)[1]


def test_step_that_a_run_deletes_meanwhile_is_left_out(run, monkeypatch):
    read = integrity.read

    def delete_then_read(path):
        if path.name == "10":
            shutil.rmtree(path)
        return read(path)

    monkeypatch.setattr(integrity, "read", delete_then_read)
    entries = survey(absolute(run.checkpoints))
    assert [(entry.step, entry.state) for entry in entries] == [(30, State.COMMITTED), (20, State.COMMITTED)]
