"""Train a tiny Llama on simulated devices under several plans; run by test_many_devices.py in its own process.

Reads a plan, a list of `key=value`, from each line. Prints one JSON object per line: the plan's losses, and what was
found out about its arrays.
"""

import json
import math
import os
import re
import sys

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[1]}"

import jax
import numpy as np

from maxlite.config import Config, resolve
from maxlite.program import build_program, open_data

ROWS, LENGTH, STEPS = 16, 16, 4
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
    # Token ids are the only int32 arrays of this shape; they should never travel.
    ids = [line for line in compiled.as_text().splitlines() if re.search(rf"= s32\[\d+,\d+,{LENGTH}\]\S* all-", line)]
    return {
        "losses": losses,
        "devices": program.mesh.size,
        "state_bytes": sum(math.prod(x.shape) * x.dtype.itemsize for x in planned),
        "state_bytes_of_fullest_device": born,
        "alias_bytes": compiled.memory_analysis().alias_size_in_bytes,
        "born_as_planned": born_as_planned,
        "donated": all(x.is_deleted() for x in jax.tree.leaves(old)),
        "ids_travel": ids,
    }


for line in sys.stdin:
    print(json.dumps(train(json.loads(line))), flush=True)
