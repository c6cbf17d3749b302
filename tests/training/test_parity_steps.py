"""Ten AdamW updates of ours have the losses of ten of PyTorch's, from the same weights on the same batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlite.config import ModelConfig, OptimizerConfig
from maxlite.model import Llama, loss_sums
from maxlite.training import init_state, make_optimizer, make_schedule, make_train_step

OPTIMIZER = OptimizerConfig(
    learning_rate=1e-3,
    lr_schedule_type="constant",
    warmup_steps_fraction=0.0,
    gradient_clipping_threshold=1.0,
    adam_b1=0.9,
    adam_b2=0.95,
    adam_eps=1e-8,
    adam_weight_decay=0.1,
)


def batch_of(tokens, valid):
    """One step's batch from tokens [B, S + 1] and valid targets [B, S]; every sequence is one document."""
    shape = valid.shape
    return {
        "inputs": tokens[:, :-1],
        "inputs_position": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        "inputs_segmentation": np.ones(shape, np.int32),
        "targets": tokens[:, 1:],
        "targets_segmentation": valid.astype(np.int32),
    }


def test_ten_adamw_steps(golden):
    check(golden, accumulation=1)


@pytest.mark.parametrize("golden", ["rope31_tied"], indirect=True)
def test_ten_accumulated_adamw_steps(golden):
    """The rows have different numbers of valid targets, so a mean of micro-batch means would not pass."""
    check(golden, accumulation=2)


def check(golden, accumulation):
    config = ModelConfig(**golden.model_keys, loss_chunk_size=64)
    optimizer_config = OPTIMIZER.model_copy(update={"gradient_accumulation_steps": accumulation})
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    schedule = make_schedule(optimizer_config, steps=len(golden.losses))
    optimizer = make_optimizer(optimizer_config, schedule, nnx.to_pure_dict(nnx.get_partition_spec(params)))

    def loss_fn(params, batch):
        return loss_sums(nnx.merge(graphdef, params), batch, config)

    train_step = jax.jit(make_train_step(loss_fn, optimizer, schedule, optimizer_config), donate_argnums=0)
    # Not a view of the fixture: donated memory must be jax's own.
    weights = {path: jnp.array(value, copy=True) for path, value in golden.weights.items()}
    nested = jax.tree_util.tree_map_with_path(
        lambda path, _: weights[".".join(entry.key for entry in path)], nnx.to_pure_dict(params)
    )
    state = init_state(lambda: nested, optimizer)
    losses, norms = [], []
    for tokens, valid in zip(golden.tokens, golden.valid, strict=True):
        state, metrics = train_step(state, batch_of(tokens, valid))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    np.testing.assert_allclose(losses, golden.losses, atol=1e-4, rtol=0)
    np.testing.assert_allclose(norms, golden.grad_norms, rtol=1e-3)
    # The fixture exercises clipping, so a step without it would not pass.
    assert min(norms) > OPTIMIZER.gradient_clipping_threshold
