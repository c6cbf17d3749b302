"""`diff`: by array, in numbers that a plain computation gives too."""

import math
import shutil

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from maxlite.checkpoint import arrays as reading
from maxlite.checkpoint import comparing
from maxlite.checkpoint.comparing import distances, same_bits


def test_equal_steps_of_two_runs(run, cli, cli_json, tmp_path):
    shutil.copytree(run.directory, tmp_path / "other")
    status, out, _ = cli("diff", run.step(20), tmp_path / "other" / "checkpoints" / "20")
    assert status == 0
    assert out.splitlines()[-1] == "all 4 arrays are equal bit for bit"
    status, found = cli_json("diff", run.directory, tmp_path / "other")
    assert (status, found["equal"], found["a"]["step"], found["b"]["step"]) == (0, True, 30, 30)
    assert all(entry["equal"] and entry["max_abs"] == 0 and entry["relative"] == 0 for entry in found["arrays"])


@pytest.mark.parametrize("group_bytes", [0, reading.GROUP_BYTES])
def test_different_steps(run, cli, cli_json, expected, monkeypatch, group_bytes):
    monkeypatch.setattr(reading, "GROUP_BYTES", group_bytes)
    status, found = cli_json("diff", run.step(10), run.step(30))
    assert (status, found["equal"]) == (1, False)
    arrays = {entry["name"]: entry for entry in found["arrays"]}
    a, b = expected(10), expected(30)
    assert arrays.keys() == a.keys()
    for name, entry in arrays.items():
        assert entry["equal"] == (name == "params/frozen")
        x, y = a[name].astype(np.float64), b[name].astype(np.float64)
        assert entry["max_abs"] == np.abs(x - y).max()
        assert entry["relative"] == pytest.approx(np.linalg.norm((x - y).ravel()) / np.linalg.norm(x.ravel()))
    status, out, _ = cli("diff", run.step(10), run.step(30))
    assert status == 1
    assert "params/frozen" not in out
    assert out.splitlines()[-1] == "3 arrays differ, 1 are equal bit for bit"


def test_damaged_step_ends_with_its_name(run, cli):
    run.flip(20)
    status, _, err = cli("diff", run.step(10), run.step(20))
    assert status == 3
    assert len(err.splitlines()) == 1
    assert "20 is damaged: params/mlp/up: not the values that were saved" in err


def test_what_cannot_be_compared_is_named(run, tmp_path, cli, cli_json):
    import jax.numpy as jnp

    from maxlite.checkpoint import Checkpointer
    from maxlite.config import CheckpointConfig

    with Checkpointer(tmp_path / "other", CheckpointConfig()) as checkpointer:
        state = {"params": {"frozen": jnp.zeros((4, 6)), "new": jnp.ones(2)}, "opt": {"mu": jnp.ones(3)}}
        checkpointer.save_final(1, state)
    status, found = cli_json("diff", run.step(10), tmp_path / "other")
    assert status == 1
    arrays = {entry["name"]: entry for entry in found["arrays"]}
    assert arrays["params/new"]["a"] is None
    assert arrays["params/new"]["b"] == {"shape": [2], "dtype": "float32"}
    assert arrays["step"]["b"] is None
    assert arrays["opt/mu"]["max_abs"] is None
    assert arrays["params/frozen"]["max_abs"] == 1.0
    out = cli("diff", run.step(10), tmp_path / "other")[1]
    assert "only in B: float32[2]" in out
    assert "float32[3,2] -> float32[3]" in out
    assert "bfloat16[4,6] -> float32[4,6]" in out


ARRAYS = st.sampled_from([np.float32, np.float16, np.int32, np.uint32, ml_dtypes.bfloat16]).flatmap(
    lambda dtype: st.tuples(
        *[
            hnp.arrays(np.float32, (7,), elements=st.floats(0, 1000, width=32)).map(lambda x: x.astype(dtype))
            for _ in range(2)
        ]
    )
)


@given(ARRAYS, st.integers(1, 8))
def test_distances_are_those_of_numpy_whatever_the_chunk(pair, chunk):
    a, b = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparing, "CHUNK", chunk)
        largest, relative = distances(a, b)
        assert same_bits(a, b) == (a.tobytes() == b.tobytes())
    x, y = a.astype(np.float64), b.astype(np.float64)
    assert largest == np.abs(x - y).max()
    norm = np.linalg.norm(x)
    wanted = 0 if (x == y).all() else np.linalg.norm(x - y) / norm if norm else math.inf
    assert relative == pytest.approx(wanted, rel=1e-12)


def test_values_that_are_not_finite():
    nan, inf = math.nan, math.inf
    assert distances(np.array([nan, inf, 1.0]), np.array([nan, inf, 1.0])) == (0, 0)
    assert math.isnan(distances(np.array([nan, 0.0]), np.array([1.0, 9.0]))[0])
    assert distances(np.array([inf]), np.array([-inf]))[0] == inf
    assert not same_bits(np.array([0.0]), np.array([-0.0]))
    assert same_bits(np.array(nan), np.array(nan))
    assert distances(np.array([1j]), np.array([-1j])) == (2, 2)
    assert distances(np.zeros((0, 3)), np.zeros((0, 3))) == (0, 0)
