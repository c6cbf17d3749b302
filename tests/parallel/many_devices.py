"""Train a tiny Llama on simulated devices under several plans; run by test_many_devices.py in its own process.

Prints one JSON object per line: the plan, its losses, and what was found out about its arrays.
"""

import json
import math
import os
import re
import sys

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[1]}"

import jax
import numpy as np
from flax import nnx

from maxlite.config import ModelConfig, OptimizerConfig, ParallelConfig
from maxlite.model import Llama, loss_sums
from maxlite.parallel import (
    batch_sharding,
    batch_shards,
    constrain,
    global_batch_size,
    make_mesh,
    param_shardings,
    process_rows,
    to_device,
)
from maxlite.training import (
    abstract_state,
    create_state,
    jit_train_step,
    make_optimizer,
    make_schedule,
    make_train_step,
    state_shardings,
)

ROWS, LENGTH, STEPS = 16, 16, 5
MODEL = ModelConfig(
    base_emb_dim=32,
    base_num_query_heads=8,
    base_num_kv_heads=4,
    base_mlp_dim=64,
    base_num_decoder_layers=2,
    head_dim=4,
    vocab_size=128,
    dtype="float32",
    z_loss_multiplier=1e-4,
)


def batch(step: int) -> dict[str, np.ndarray]:
    """Random tokens in two documents a row; the rows have very different numbers of valid targets."""
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, MODEL.vocab_size, (ROWS, LENGTH + 1), dtype=np.int32)
    segments = np.repeat(np.int32([[1, 2]]), LENGTH // 2, axis=1).repeat(ROWS, axis=0)
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "inputs_position": np.tile(np.arange(LENGTH // 2, dtype=np.int32), (ROWS, 2)),
        "inputs_segmentation": segments,
        "targets_segmentation": np.where(np.arange(LENGTH) < np.arange(ROWS)[:, None], segments, 0),
    }


def train(plan: dict[str, int]) -> dict[str, object]:
    sizes = {f"ici_{axis}_parallelism": plan.get(axis, 1) for axis in ("data", "fsdp", "tensor")}
    config = OptimizerConfig(
        learning_rate=1e-2, gradient_accumulation_steps=plan.get("micro_batches", 1), opt_type=plan.get("opt", "adamw")
    )
    mesh = make_mesh(ParallelConfig(**sizes), jax.devices()[: math.prod(sizes.values())])

    def model() -> Llama:
        return Llama(MODEL, rngs=nnx.Rngs(0), constrain=constrain(mesh))

    graph, params = nnx.split(nnx.eval_shape(model))
    axes = nnx.get_partition_spec(params)
    schedule = make_schedule(config, 10)
    optimizer = make_optimizer(config, schedule, axes)

    def init_params() -> nnx.State:
        return nnx.split(model())[1]

    abstract = abstract_state(init_params, optimizer)
    shardings = state_shardings(abstract, param_shardings(mesh, abstract.params, axes))
    state = create_state(init_params, optimizer, shardings)
    born = max(
        sum(s.data.nbytes for x in jax.tree.leaves(state) for s in x.addressable_shards if s.device == d)
        for d in mesh.devices.flat
    )
    born_as_planned = jax.tree.leaves(jax.tree.map(lambda x: x.sharding, state)) == jax.tree.leaves(shardings)

    rows = batch_sharding(mesh)
    per_device = ROWS / config.gradient_accumulation_steps / mesh.size
    assert global_batch_size(per_device, mesh.size, config.gradient_accumulation_steps, batch_shards(mesh)) == ROWS
    assert process_rows(rows, ROWS) == slice(0, ROWS)

    def loss(params: nnx.State, batch: dict[str, jax.Array]) -> object:
        return loss_sums(nnx.merge(graph, params), batch, MODEL)

    first = to_device(batch(0), rows)
    step = jit_train_step(make_train_step(loss, optimizer, schedule, config), shardings, rows)
    compiled = step.lower(state, first).compile()
    losses = []
    for n in range(STEPS):
        old = state
        state, metrics = compiled(state, to_device(batch(n), rows))
        losses.append(float(metrics["loss"]))
    # Token ids are the only int32 arrays of this shape; they should never travel.
    ids = [line for line in compiled.as_text().splitlines() if re.search(rf"= s32\[\d+,\d+,{LENGTH}\]\S* all-", line)]
    return {
        "plan": plan,
        "losses": losses,
        "state_bytes": sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(abstract)),
        "state_bytes_of_fullest_device": born,
        "alias_bytes": compiled.memory_analysis().alias_size_in_bytes,
        "born_as_planned": born_as_planned,
        "donated": all(x.is_deleted() for x in jax.tree.leaves(old)),
        "ids_travel": ids,
    }


for line in sys.stdin:
    print(json.dumps(train(json.loads(line))), flush=True)
