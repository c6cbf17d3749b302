"""Learning-rate schedules: a warm-up, then the shape the config names."""

from __future__ import annotations

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from maxlite.config import OptimizerConfig


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate as a function of the updates done so far: update N uses `schedule(N - 1)`.

    With T the schedule's length and W = round(T * warmup_steps_fraction), update N gets

    - peak * N / W for N <= W: the first update already moves the weights, update W is the first at the peak;
    - after that, with f = learning_rate_final_fraction and t = (N - W) / (T - W):
      cosine  peak * (f + (1 - f) * (1 + cos(pi t)) / 2);
      linear  peak * (1 - (1 - f) t);
      wsd     peak, then over the last D = round(T * wsd_decay_steps_fraction) updates linearly to f * peak;
      constant  peak.

    Update T gets the final value, to float32 rounding, and so does every update after T.

    Args:
        config: the shape; rates are per update.
        steps: optimizer updates in the run, the length when learning_rate_schedule_steps is -1.
    """
    total = steps if config.learning_rate_schedule_steps == -1 else config.learning_rate_schedule_steps
    peak = config.learning_rate
    final = peak * config.learning_rate_final_fraction
    # round, not int: 0.29 * 100 is 28.999999999999996.
    warmup = round(total * config.warmup_steps_fraction)
    after = total - warmup

    pieces: list[optax.Schedule] = []
    boundaries: list[int] = []
    if warmup:
        pieces.append(optax.linear_schedule(0.0, peak, warmup))
        boundaries.append(warmup)
    if config.lr_schedule_type == "constant" or after == 0:
        pieces.append(optax.constant_schedule(peak))
    elif config.lr_schedule_type == "cosine":
        pieces.append(optax.cosine_decay_schedule(peak, after, alpha=config.learning_rate_final_fraction))
    elif config.lr_schedule_type == "linear":
        pieces.append(_fall(peak, final, after))
    else:
        decay = min(round(total * config.wsd_decay_steps_fraction), after)
        pieces.append(optax.constant_schedule(peak))
        if decay:
            pieces.append(_fall(peak, final, decay))
            boundaries.append(total - decay)
    by_update = optax.join_schedules(pieces, boundaries)

    def schedule(count: ArrayLike) -> jnp.ndarray:
        return jnp.asarray(by_update(jnp.asarray(count) + 1), jnp.float32)

    return schedule


def _fall(peak: float, final: float, updates: int) -> optax.Schedule:
    """Linear from peak to final, and by no rounding below it: a rate under 0 would climb."""
    line = optax.linear_schedule(peak, final, updates)
    return lambda count: jnp.maximum(line(count), final)
