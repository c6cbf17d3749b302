"""Train a tiny Llama on simulated devices under several plans; run by test_many_devices.py in its own process.

Reads a plan, a list of `key=value`, from each line. Prints one JSON object per line: the plan's losses, and what was
found out about its arrays. A line that begins with `flash` asks for that kernel alone (`attention`).
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[1]}"

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config import Config, resolve
from maxlite.model import Placement
from maxlite.model.attention import dot_product
from maxlite.model.placement import HEADS, KV_HEADS
from maxlite.model.splash import flash
from maxlite.parallel import bytes_per_device, constrain, length_shards, make_mesh, per_shard, slice_of_devices
from maxlite.parallel.collectives import read_collectives
from maxlite.parallel.hlo import HloProgram
from maxlite.program import build_program, open_data

ROWS, LENGTH, STEPS = 16, 16, 5
KEYS = [
    "run_name=many_devices",
    "dataset_type=synthetic",
    f"max_target_length={LENGTH}",
    f"steps={STEPS}",
    "warmup_steps_fraction=0",
    "learning_rate=1e-2",
    "base_emb_dim=32",
    "base_num_query_heads=16",
    "base_num_kv_heads=8",
    "base_mlp_dim=64",
    "base_num_decoder_layers=2",
    "head_dim=4",
    "vocab_size=128",
    "dtype=float32",
    "z_loss_multiplier=1e-4",
    "eval_steps=0",
]


def shape_targets(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Two documents a row, and rows with very different numbers of valid targets."""
    half = np.arange(LENGTH) % (LENGTH // 2)
    segments = np.broadcast_to(1 + np.arange(LENGTH, dtype=np.int32) // (LENGTH // 2), (ROWS, LENGTH))
    return batch | {
        "inputs_position": np.broadcast_to(half.astype(np.int32), (ROWS, LENGTH)),
        "inputs_segmentation": segments,
        "targets_segmentation": np.where(np.arange(LENGTH) < np.arange(ROWS)[:, None], segments, 0),
    }


def train(keys: list[str]) -> dict[str, object]:
    program = build_program(resolve(Config, None, [*KEYS, *keys], {}).config)
    assert program.rows == ROWS
    state = program.init_state()
    leaves = jax.tree.leaves(state)
    planned = jax.tree.leaves(program.abstract_state)
    params = jax.tree.leaves(program.abstract_state.params)
    born = max(
        sum(s.data.nbytes for x in leaves for s in x.addressable_shards if s.device == device)
        for device in program.mesh.devices.flat
    )
    born_as_planned = [x.sharding for x in leaves] == [x.sharding for x in planned]
    compiled, flags = program.train_step, program.agreement.to_device({})
    losses = []
    with open_data(program) as data:
        for step in range(1, STEPS + 1):
            old = state
            state, metrics = compiled(state, program.to_device(shape_targets(data.train_batch(step))), flags)
            losses.append(float(metrics["loss"]))
    text = compiled.as_text()
    collectives = read_collectives(HloProgram(text), program.mesh, slice_of_devices(program.mesh_plan))
    return {
        "losses": losses,
        "devices": program.mesh.size,
        "state_bytes": sum(math.prod(x.shape) * x.dtype.itemsize for x in planned),
        "params": len(params),
        "params_bytes_of_a_device": bytes_per_device(params),
        "state_bytes_of_fullest_device": born,
        "alias_bytes": compiled.memory_analysis().alias_size_in_bytes,
        "born_as_planned": born_as_planned,
        "donated": all(x.is_deleted() for x in jax.tree.leaves(old)),
        "dcn": [each._asdict() for each in collectives if each.network == "DCN"],
        "tokens_travel": [line for line in text.splitlines() if re.search(r"= \(?s32\[\d+,\d+\S* all-", line)],
    }


def attention(keys: list[str]) -> dict[str, float]:
    """How far splash attention on each device's share is from plain attention on one: its result and its gradients.

    In float32, packed documents, one of which begins in one device's part and ends in another's.
    """
    config = resolve(Config, None, ["run_name=x", *keys], {}).config
    mesh = make_mesh(config.parallel)
    placement = Placement(constrain(mesh), per_shard(mesh), length_shards(mesh), split=True)
    length = 512
    q, k, v = (jax.random.normal(jax.random.key(n), (4, length, n, 64)) for n in (4, 2, 2))
    lengths = [[length], [100, 300, 112], [3, 509], [250, 12, 250]]
    segments = np.stack([np.repeat(np.arange(len(row)) + 1, row) for row in lengths])
    segments[1, 400:] = 0  # padding

    def spread(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = placement.constrain(q, HEADS), placement.constrain(k, KV_HEADS), placement.constrain(v, KV_HEADS)
        return flash(q, k, v, segments, config.model, placement, interpret=True)

    def value_and_gradients(function: Callable[..., jax.Array], *arguments: jax.Array) -> list[jax.Array]:
        value, pull = jax.vjp(function, *arguments)
        return jax.tree.leaves((value, pull(jnp.sin(value))))

    both = (spread, lambda *arguments: dot_product(*arguments, segments))
    found, wanted = (jax.jit(value_and_gradients, static_argnums=0)(each, q, k, v) for each in both)
    return {
        name: float(np.abs(np.asarray(a) - np.asarray(b)).max())
        for name, a, b in zip(("value", "dq", "dk", "dv"), found, wanted, strict=True)
    }


for line in sys.stdin:
    match json.loads(line):
        case ["flash", *keys]:
            print(json.dumps(attention(keys)), flush=True)
        case keys:
            print(json.dumps(train(keys)), flush=True)
