"""`load_arrays`: the documented way to read one array, or the parameters alone."""

import re
import textwrap

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxlite.checkpoint import RestoreError, load_arrays
from maxlite.config import InputError


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        assert isinstance(x, jax.Array)
        assert (x.dtype, x.shape) == (wanted[name].dtype, wanted[name].shape)
        assert np.asarray(x).tobytes() == wanted[name].tobytes()


def test_all_of_the_newest_step(run, expected):
    same(load_arrays(run.directory), expected(30))
    same(load_arrays(run.checkpoints), expected(30))
    same(load_arrays(str(run.step(10))), expected(10))


@pytest.mark.parametrize("prefix", ["params", "params/mlp", "params/mlp/up", "/params/mlp/", "step"])
def test_what_is_under_a_name(run, expected, prefix):
    name = prefix.strip("/")
    wanted = {key: x for key, x in expected(20).items() if key == name or key.startswith(name + "/")}
    assert wanted
    same(load_arrays(run.directory, prefix, step=20), wanted)


def test_the_example_of_its_docstring_runs(run, expected, monkeypatch):
    code = textwrap.dedent("\n".join(re.findall(r"^        (\S.*)$", load_arrays.__doc__.split("Args:")[0], re.M)))
    code = code.replace("runs/quickstart", "run").replace("params/layers/mlp/up/kernel", "params/mlp/up")
    code = code.replace("step=250", "step=20")
    monkeypatch.chdir(run.directory.parent)
    names = {}
    exec(code, names)
    same(names["params"], {name: x for name, x in expected(30).items() if name.startswith("params/")})
    same(names["kernel"], {"params/mlp/up": expected(20)["params/mlp/up"]})


def test_to_a_sharding(run):
    sharding = NamedSharding(jax.make_mesh((1,), ("x",)), PartitionSpec("x"))
    assert load_arrays(run.directory, "params/mlp/up", sharding=sharding)["params/mlp/up"].sharding == sharding


def test_name_that_is_not_there_gets_the_nearest(run):
    with pytest.raises(
        InputError, match=r"step 30 has no array 'params/mlp/upp' .*nearest: params/mlp/up, params/mlp"
    ):
        load_arrays(run.directory, "params/mlp/upp")
    with pytest.raises(InputError, match="nearest: params"):
        load_arrays(run.directory, "param")  # not the start of a name, but a whole one


def test_checkpoint_that_is_not_there(run, tmp_path):
    with pytest.raises(InputError, match="no committed step 11; steps there: 30, 20, 10"):
        load_arrays(run.directory, step=11)
    with pytest.raises(InputError, match="no checkpoint there"):
        load_arrays(tmp_path / "nothing")
    with pytest.raises(InputError, match="is step 10, and step=20 is asked for"):
        load_arrays(run.step(10), step=20)


def test_damage_is_never_returned(run, expected, capsys):
    run.flip(30)
    same(load_arrays(run.directory, "opt"), {"opt/mu": expected(30)["opt/mu"]})  # as saved
    same(load_arrays(run.directory, "params"), {k: x for k, x in expected(20).items() if k.startswith("params/")})
    assert "falling back to step 20" in capsys.readouterr().out
    with pytest.raises(RestoreError, match="not the values that were saved"):
        load_arrays(run.directory, step=30)


def test_damaged_metadata_falls_back_too(run, expected, capsys):
    (run.step(30) / "metadata" / "metadata.json").write_text("{}")
    same(load_arrays(run.directory), expected(20))
    assert "step 20" in capsys.readouterr().out
