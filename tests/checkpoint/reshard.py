"""Saves the toy run under several meshes, or restores it under others, bit for bit. Run by test_processes.py.

Usage: reshard.py save|restore DIRECTORY, in a process of 8 devices to save, and of 1, 2, 4 or 8 to restore.
"""

import importlib.util
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxlite.checkpoint import Checkpointer, restore_newest
from maxlite.config import CheckpointConfig

spec = importlib.util.spec_from_file_location("checkpoint_conftest", Path(__file__).with_name("conftest.py"))
conftest = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = conftest
spec.loader.exec_module(conftest)
toy = conftest.Toy

SHARDED = {(4, 6): P("fsdp", "tensor"), (40_000,): P(("fsdp", "tensor")), (): P()}
TURNED = {(4, 6): P(None, "tensor"), (40_000,): P("tensor"), (): P()}
WHOLE = {(4, 6): P(), (40_000,): P(), (): P()}
SAVED = {"4x2": ((4, 2), SHARDED), "2x2": ((2, 2), TURNED), "1x2": ((1, 2), SHARDED), "8x1": ((8, 1), WHOLE)}
RESTORED = {
    1: [((1, 1), SHARDED)],
    2: [((2, 1), SHARDED), ((1, 2), TURNED)],
    4: [((2, 2), SHARDED), ((4, 1), WHOLE)],
    8: [((4, 2), TURNED), ((4, 2), SHARDED)],
}


def abstract(mesh_shape, specs):
    devices = np.array(jax.devices()[: np.prod(mesh_shape)]).reshape(mesh_shape)
    mesh = jax.sharding.Mesh(devices, ("fsdp", "tensor"))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, specs[x.shape])), toy.abstract()
    )


def save(directory):
    assert len(jax.devices()) == 8
    for step, (name, (mesh_shape, specs)) in enumerate(SAVED.items(), start=1):
        shardings = jax.tree.map(lambda x: x.sharding, abstract(mesh_shape, specs))
        with Checkpointer(directory / name, CheckpointConfig()) as checkpointer:
            checkpointer.save_final(step, jax.device_put(toy.after(step), shardings))


def restore(directory):
    for step, name in enumerate(SAVED, start=1):
        for mesh_shape, specs in RESTORED[len(jax.devices())]:
            wanted = abstract(mesh_shape, specs)
            restored = restore_newest(directory / name, wanted)
            assert restored.metadata.step == step
            jax.tree.map(lambda x, a: np.testing.assert_equal(x.sharding, a.sharding), restored.state, wanted)
            conftest.assert_same(restored.state, toy.after(step))
    print("same")


if __name__ == "__main__":
    {"save": save, "restore": restore}[sys.argv[1]](Path(sys.argv[2]))
