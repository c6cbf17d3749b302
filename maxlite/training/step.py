"""One optimizer update as a pure function, to be jitted with its state donated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from maxlite.config import OptimizerConfig
from maxlite.training.state import TrainState

Metrics = dict[str, jax.Array]


class LossSums(Protocol):
    """Sums over the valid targets of a batch, float32 scalars; a NamedTuple or another pytree with these names."""

    loss_sum: jax.Array  # cross-entropy, nats
    z_loss_sum: jax.Array  # z-loss with its weight, to be added to the cross-entropy
    num_targets: jax.Array


LossFn = Callable[[Any, Any], Any]  # (params, batch) -> LossSums
Gradient = Callable[[Any, Any], Any]  # (params, batch) -> (gradient, LossSums)
TrainStep = Callable[[TrainState, Any], tuple[TrainState, Metrics]]


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    config: OptimizerConfig,
    summed_once: Callable[[Gradient], Gradient] = lambda function: function,
) -> TrainStep:
    """Build `(state, batch) -> (state, metrics)`, to be jitted with the state donated (`jit_train_step`).

    The batch is a tree of arrays `[rows, ...]`, with rows a multiple of gradient_accumulation_steps. The gradient is
    that of (sum of losses) / (number of valid targets) over the whole batch, however many micro-batches it is split
    into; a batch without valid targets has loss and gradient 0.

    If the loss, the gradient norm, or any parameter or optimizer value that the update would give is not finite,
    parameters and optimizer state keep their values, bit for bit; the step advances all the same, as the batch has
    been used. Whether to go on is the caller's choice (`FiniteGuard`).

    Metrics, scalars, float32 but for the last: `loss` and `z_loss` (nats per valid target; the gradient is of their
    sum, and the second is 0 where z_loss_multiplier is), `grad_norm` (before clipping), `learning_rate`, `finite`
    (bool).

    Args:
        loss_fn: `(params, batch) -> LossSums`.
        optimizer: gets the mean gradient.
        schedule: the learning rate, for the metrics.
        config: of the optimizer.
        summed_once: wraps the function that sums gradient and loss over all micro-batches, so that devices add up what
            each has summed, once.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    hold_updates = config.opt_type == "muon"
    gradient_sums = summed_once(
        lambda params, batch: _gradient_sums(loss_fn, params, batch, config.gradient_accumulation_steps)
    )

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        grads, sums = gradient_sums(state.params, batch)
        # A batch may be all padding; its sums are 0 then, and 0 / 1 is the wanted mean.
        scale = 1.0 / jnp.maximum(sums.num_targets.astype(jnp.float32), 1.0)
        loss, z_loss = sums.loss_sum * scale, sums.z_loss_sum * scale
        # The norm of the sums, then scaled: scaling the gradient is left to fuse into the update.
        grad_norm = _global_norm(grads) * scale

        def propose(params: Any, opt_state: Any) -> tuple[Any, Any]:
            mean = jax.tree.map(lambda g, p: (g.astype(jnp.float32) * scale).astype(p.dtype), grads, params)
            return optimizer.update(mean, opt_state, params, step=state.step, grad_norm=grad_norm)

        # The result is looked at before anything is written: once here, where nothing but a bool is kept of it, and
        # computed again where it is kept. That reads the state twice; to hold it instead takes the memory of a second
        # state. Muon's updates, the costly ones, are held.
        updates, next_opt_state = propose(state.params, state.opt_state)
        next_state = optax.apply_updates(state.params, updates), next_opt_state
        finite = jnp.isfinite(loss + z_loss) & jnp.isfinite(grad_norm) & _all_finite(next_state)

        def update(params: Any, opt_state: Any) -> tuple[Any, Any]:
            again, opt_state = propose(params, opt_state)
            return optax.apply_updates(params, updates if hold_updates else again), opt_state

        # A branch, not a select of each array: a select needs old and new moments at once; a branch updates the
        # donated buffers in place.
        params, opt_state = jax.lax.cond(finite, update, lambda *kept: kept, state.params, state.opt_state)
        metrics = {
            "loss": loss,
            "z_loss": z_loss,
            "grad_norm": grad_norm,
            "learning_rate": jnp.asarray(schedule(state.step)),
            "finite": finite,
        }
        return TrainState(state.step + 1, params, opt_state), metrics

    return train_step


def jit_train_step(train_step: Callable[..., Any], shardings: TrainState, *input_shardings: Any) -> Any:
    """Jit with the state donated: the new state is written over the old one, which may not be used again.

    Args:
        train_step: from `make_train_step`, or one around it that takes more than the batch.
        shardings: of the state, from `state_shardings`; the new state has them too.
        input_shardings: of the batch (every array of it), and of whatever else the step takes.
    """
    return jax.jit(
        train_step,
        in_shardings=(shardings, *input_shardings),
        out_shardings=(shardings, shardings.step),
        donate_argnums=0,
    )


def _gradient_sums(loss_fn: LossFn, params: Any, batch: Any, micro_batches: int) -> tuple[Any, Any]:
    """Gradient of the batch's summed loss, and the sums. Holds the activations of one micro-batch at a time."""

    def objective(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        sums = loss_fn(params, batch)
        return sums.loss_sum + sums.z_loss_sum, sums

    def gradient(batch: Any) -> tuple[Any, Any]:
        (_, sums), grads = jax.value_and_grad(objective, has_aux=True)(params, batch)
        return grads, sums

    if micro_batches == 1:
        return gradient(batch)

    def accumulate(total: Any, micro_batch: Any) -> tuple[Any, None]:
        return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, gradient(micro_batch)), None

    micro = jax.tree.map(lambda x: _split_rows(x, micro_batches), batch)
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), micro)
    zeros = jax.tree.map(
        # In float32 whatever the weights' dtype: small micro-batch gradients must not vanish in the sum.
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)),
        jax.eval_shape(gradient, first),
    )
    return jax.lax.scan(accumulate, zeros, micro)[0]


def _split_rows(x: jax.Array, micro_batches: int) -> jax.Array:
    """`[rows, ...]` to `[micro_batches, rows / micro_batches, ...]`, each micro-batch with rows of every device.

    Row r goes to micro-batch r mod micro_batches: as a device holds consecutive rows, a multiple of micro_batches,
    this moves nothing between devices. Consecutive rows per micro-batch would.
    """
    rows = x.shape[0]
    if rows % micro_batches:
        raise ValueError(f"{rows} rows do not split into gradient_accumulation_steps={micro_batches} micro-batches")
    return jnp.swapaxes(x.reshape(rows // micro_batches, micro_batches, *x.shape[1:]), 0, 1)


def _global_norm(tree: Any) -> jax.Array:
    """Root of the sum of squares of all elements, summed in float32."""
    squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def _all_finite(tree: Any) -> jax.Array:
    """Whether no element is infinite or NaN."""
    return jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]).all()
