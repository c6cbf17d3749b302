"""Restores the toy run's step 3 sharded over 8 devices, and saves step 4. Run by test_processes.py: DIRECTORY."""

import importlib.util
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxlite.checkpoint import Checkpointer
from maxlite.config import CheckpointConfig

spec = importlib.util.spec_from_file_location("checkpoint_conftest", Path(__file__).with_name("conftest.py"))
conftest = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = conftest
spec.loader.exec_module(conftest)
toy = conftest.Toy

mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
specs = {(4, 6): P("fsdp", "tensor"), (40_000,): P(("fsdp", "tensor")), (): P()}
abstract = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, specs[x.shape])), toy.abstract()
)
with Checkpointer(sys.argv[1], CheckpointConfig()) as checkpointer:
    state, step = checkpointer.restore_or_init(abstract, toy.init)
    assert step == 3
    assert len(jax.devices()) == 8
    jax.tree.map(lambda x, a: np.testing.assert_equal(x.sharding, a.sharding), state, abstract)
    conftest.assert_same(state, toy.after(3))
    checkpointer.save_final(4, toy.step(state))
