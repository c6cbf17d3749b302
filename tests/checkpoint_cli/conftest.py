"""One small run with three checkpoints, saved once and copied for every test."""

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxlite.checkpoint import Checkpointer
from maxlite.checkpoint.cli import main
from maxlite.config import CheckpointConfig, Config, resolve

STEPS = (10, 20, 30)
BIG = 300_000  # elements: so large a file that it has no digest of its own, and only its fingerprint proves it


def state_after(step):
    """What was saved as that step; `params/frozen` is the same in all of them."""
    whole = NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec("data"))
    return {
        "params": {
            "mlp": {"up": jax.device_put(jnp.arange(BIG, dtype=jnp.float32) + step, whole)},
            "frozen": jnp.linspace(-1, 1, 24, dtype=jnp.bfloat16).reshape(4, 6),
        },
        "opt": {"mu": jnp.full((3, 2), step / 10)},
        "step": jnp.int32(step),
    }


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "run" / "checkpoints"
    config = resolve(Config, None, ["steps=77", "run_name=mine"], {}).config.flat()
    metadata = {"config": config, "data_fingerprint": "abc123", "versions": {"jax": "9.9"}}
    with Checkpointer(directory, CheckpointConfig(), metadata=metadata) as checkpointer:
        for step in STEPS:
            checkpointer.save(step, state_after(step), {"loss": 100 / step})
            checkpointer.wait()
        assert checkpointer.stats.committed == len(STEPS)
    return directory.parent


class Run:
    """A copy of the run that a test may damage."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.checkpoints = directory / "checkpoints"

    def step(self, step):
        return self.checkpoints / str(step)

    def big_file(self, step):
        """The file that holds the values of params/mlp/up."""
        return max(
            (path for path in self.step(step).rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
        )

    def flip(self, step):
        """Flips one bit in the middle of the large array."""
        file = self.big_file(step)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)

    def truncate(self, step):
        file = self.big_file(step)
        os.truncate(file, file.stat().st_size // 2)

    def tear(self, step):
        (self.step(step) / "commit_success.txt").unlink()

    def listing(self):
        return sorted(path.name for path in self.checkpoints.iterdir())


@pytest.fixture
def run(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    return Run(tmp_path / "run")


@pytest.fixture
def cli(capsys):
    """`cli("list", path)`: the exit status, what was printed, and what was said on standard error."""

    def call(*arguments):
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


@pytest.fixture
def cli_json(cli):
    """`cli_json("list", path)`: the exit status, and the parsed output of the command with `--json`."""

    def call(*arguments):
        status, out, err = cli(*arguments, "--json")
        assert not err
        return status, json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    return call


@pytest.fixture
def expected():
    """What load_arrays gives for a step, as numpy arrays by name."""

    def arrays(step):
        state = state_after(step)
        params = {
            f"params/{name}": x
            for name, x in (("mlp/up", state["params"]["mlp"]["up"]), ("frozen", state["params"]["frozen"]))
        }
        return {
            name: np.asarray(x) for name, x in {"step": state["step"], "opt/mu": state["opt"]["mu"], **params}.items()
        }

    return arrays
