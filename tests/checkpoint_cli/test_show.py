"""`show`: what a step holds, from its metadata alone."""

import re
import shutil


def test_newest_step_with_its_tree_of_arrays(run, cli):
    status, out, err = cli("show", run.directory)
    assert (status, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "step 30"
    assert "parent step 20" in lines
    assert "metrics loss 3.3333" in lines
    assert "mesh data 1" in lines
    assert "versions jax 9.9" in lines
    assert "data fingerprint abc123" in lines
    assert "config steps=77 run_name=mine" in lines or "config run_name=mine steps=77" in lines
    tree = out[out.index("\narray ") + 1 :].splitlines()[:-2]
    assert [line.split() for line in tree[1:]] == [
        ["opt", "24", "B"],
        ["mu", "float32[3,2]", "24", "B", "one", "device"],
        ["params", "1.20", "MB"],
        ["frozen", "bfloat16[4,6]", "48", "B", "one", "device"],
        ["mlp", "1.20", "MB"],
        ["up", "float32[300000]", "1.20", "MB", "(data)"],
        ["step", "int32[]", "4", "B", "one", "device"],
    ]
    assert [len(line) - len(line.lstrip()) for line in tree[1:]] == [0, 2, 0, 2, 2, 4, 0]
    assert out.endswith("4 arrays, 1.20 MB; 300,024 parameters under params/\n")


def test_json_of_one_step(run, cli_json):
    status, shown = cli_json("show", run.step(10))
    assert status == 0
    assert (shown["step"], shown["parent_step"], shown["verified"]) == (10, None, True)
    assert shown["run"]["data_fingerprint"] == "abc123"
    arrays = {array["name"]: array for array in shown["arrays"]}
    assert arrays["params/mlp/up"] == {
        "name": "params/mlp/up",
        "shape": [300_000],
        "dtype": "float32",
        "bytes": 1_200_000,
        "sharding": "(data)",
    }
    assert shown["parameters"] == 300_024
    assert shown["bytes"] == 1_200_000 + 48 + 24 + 4


def test_arrays_are_not_read(run, cli):
    for folder in run.step(30).glob("state/*/c"):
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    status, out, _ = cli("show", run.directory)
    assert status == 0
    assert re.search(r"^files +DAMAGED: .* is missing", out, re.M)
    assert "float32[300000]" in out


def test_torn_step_says_so(run, cli):
    run.tear(30)
    assert "no commit marker" in cli("show", run.step(30))[1]
    assert cli("show", run.directory)[1].splitlines()[0].split() == ["step", "20"]


def test_step_without_metadata_is_damaged_in_one_line(run, cli):
    shutil.rmtree(run.step(30) / "metadata")
    status, out, err = cli("show", run.step(30))
    assert (status, out) == (3, "")
    assert len(err.splitlines()) == 1
    assert "metadata" in err
