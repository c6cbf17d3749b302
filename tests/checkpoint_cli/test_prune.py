"""`prune`: nothing goes without `--yes`, the newest good step never."""

import fcntl

import pytest


@pytest.mark.parametrize(
    ("rule", "stays"),
    [
        (["--keep", "2"], ["20", "30"]),
        (["--keep", "9"], ["10", "20", "30"]),
        (["--keep-every", "20"], ["20", "30"]),
        (["--keep", "1", "--keep-every", "10"], ["10", "20", "30"]),
        (["--steps", "10,20"], ["30"]),
    ],
)
def test_what_goes_is_shown_first_and_deleted_with_yes(run, cli, cli_json, rule, stays):
    status, planned = cli_json("prune", run.directory, *rule)
    assert status == 0
    assert run.listing() == ["10", "20", "30"]
    assert not planned["deleted"]
    going = [entry["step"] for entry in planned["directories"]]
    assert going == [step for step in (10, 20, 30) if str(step) not in stays]
    on_storage = [file for step in going for file in run.step(step).rglob("*") if file.is_file()]
    assert planned["bytes"] == sum(file.stat().st_size for file in on_storage)
    out = cli("prune", run.directory, *rule)[1]
    assert ("nothing was deleted; --yes deletes" in out) == bool(going)
    status, out, _ = cli("prune", run.directory, *rule, "--yes")
    assert status == 0
    assert run.listing() == stays
    assert ("nothing to delete" in out) == (not going)


def test_newest_good_step_stays_whatever_is_asked(run, cli):
    run.flip(30)  # its files look right
    status, _, err = cli("prune", run.directory, "--steps", "20,10", "--yes")
    assert status == 2
    assert "20 is the newest good step" in err
    assert cli("prune", run.directory, "--keep", "1", "--yes")[0] == 0
    assert run.listing() == ["20", "30"]
    assert cli("prune", run.directory, "--steps", "30", "--yes")[0] == 0
    assert run.listing() == ["20"]


def test_nothing_goes_when_no_step_is_good(run, cli):
    for step in (10, 20, 30):
        run.truncate(step)
    for rule in (["--keep", "1"], ["--steps", "10"]):
        status, _, err = cli("prune", run.directory, *rule, "--yes")
        assert status == 3
        assert "none of the checkpoints is good" in err
    assert run.listing() == ["10", "20", "30"]


def test_leftovers_and_what_was_set_aside(run, cli, cli_json):
    others = ["20.set-aside-1", "40.orbax-checkpoint-tmp-3", "5.deleting"]
    for name in (*others, "notes"):
        (run.checkpoints / name / "state").mkdir(parents=True)
    run.tear(20)
    assert cli("prune", run.directory, "--leftovers", "--yes")[0] == 0
    assert run.listing() == ["10", "20", "20.set-aside-1", "30", "notes"]
    _, planned = cli_json("prune", run.directory, "--set-aside", "--yes")
    assert [entry["why"] for entry in planned["directories"]] == ["set aside"]
    assert planned["deleted"]
    assert cli("prune", run.directory, "--steps", "20", "--yes")[0] == 0  # torn
    assert run.listing() == ["10", "30", "notes"]


def test_refused_while_a_run_is_training_there(run, cli):
    lock = run.directory / ".lock"
    lock.write_text("4711")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for more in ([], ["--yes"]):
            status, _, err = cli("prune", run.checkpoints, "--keep", "1", *more)
            assert status == 2
            assert "process 4711 is training there" in err
    assert run.listing() == ["10", "20", "30"]
    assert cli("prune", run.directory, "--keep", "1", "--yes")[0] == 0
    assert lock.read_text() == "4711"


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ([], "say what goes"),
        (["--keep", "0"], "'0' is not a number of 1 or more"),
        (["--steps", "10,x"], "'10,x' is not a list of steps"),
        (["--steps", "10", "--keep", "1"], "give one or the other"),
        (["--steps", "11"], "there is no step 11; steps there: 30, 20, 10"),
    ],
)
def test_what_cannot_be_meant(run, cli, rule, words):
    status, out, err = cli("prune", run.directory, *rule, "--yes")
    assert (status, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1
    assert run.listing() == ["10", "20", "30"]


def test_one_step_is_no_place_to_prune(run, cli):
    status, _, err = cli("prune", run.step(10), "--keep", "1", "--yes")
    assert status == 2
    assert "by --steps 10" in err
