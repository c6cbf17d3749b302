"""`verify`: good only when every bit of every array is what was saved."""

import pytest


def test_all_good(run, cli):
    status, out, err = cli("verify", run.directory)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == ["step 30", "step 20", "step 10"]
    assert "2 steps left, about " in lines[0]
    assert "left" not in lines[2]
    assert lines[-1] == "3 steps are good"


@pytest.mark.parametrize("damage", ["flip", "truncate", "tear"])
def test_damage_is_named_and_nothing_else_suffers(run, cli, cli_json, damage):
    getattr(run, damage)(20)
    before = run.listing()
    status, out, _ = cli("verify", run.directory)
    assert status == 3
    assert out.splitlines()[-1] == "2 steps are good; not good: 20"
    what = {"flip": "params/mlp/up: not the values that were saved", "truncate": "bytes instead", "tear": "no commit"}
    (line,) = [line for line in out.splitlines() if "NOT GOOD" in line]
    assert line.startswith("step 20: NOT GOOD: ")
    assert what[damage] in line
    status, verdicts = cli_json("verify", run.directory)
    assert status == 3
    assert [(verdict["step"], verdict["good"]) for verdict in verdicts] == [(30, True), (20, False), (10, True)]
    assert what[damage] in verdicts[1]["problem"]
    assert run.listing() == before


def test_one_step_alone(run, cli):
    run.flip(20)
    assert cli("verify", run.step(30))[0] == 0
    assert cli("verify", run.step(20))[0] == 3


def test_what_is_set_aside_or_being_written_is_no_step_to_verify(run, cli):
    for name in ("40.orbax-checkpoint-tmp-3", "20.set-aside-1"):
        (run.checkpoints / name / "state").mkdir(parents=True)
    assert cli("verify", run.directory)[0] == 0
