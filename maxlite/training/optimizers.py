"""Optimizers from optax, told apart by what each parameter is.

Layers are stored stacked, so a norm's scale is a 2-D array `[layers, embed]` and a projection may have four
dimensions. Which parameters are decayed, and which are matrices for Muon, is therefore read from their logical
axis names, never from `ndim`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from maxlite.config import OptimizerConfig

# Stacking adds these; what is left says what one layer's parameter is.
STACK_AXES = frozenset({"layers"})
# An RMS of 0.2 is what AdamW's updates have (arXiv:2502.16982, section 2.2), so one learning rate serves Muon's
# matrices and AdamW's embeddings and norms alike.
MUON_UPDATE_RMS = 0.2


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, axes: Any
) -> optax.GradientTransformationExtraArgs:
    """Clip by global norm, find a direction, add decoupled weight decay, scale by minus the learning rate.

    `update` takes two keywords more than optax's own. `step`, the number of updates done: the learning rate is a
    function of it alone, so that a refused update does not shift the schedule and no second counter is saved.
    `grad_norm`, the global norm of the gradient: the train step has it already, and the gradient is read once less.

    adafactor here has no parameter scaling and no momentum (as arXiv:2106.04560), so `learning_rate` means what it
    means for adamw; its update is clipped to an RMS of 1 within each layer. muon treats every weight matrix of every
    layer apart, and leaves embeddings, head, norms and biases to adamw.

    Args:
        config: kind and coefficients.
        schedule: learning rate by the updates done.
        axes: the tree of the parameters, with a `PartitionSpec` of logical axis names for each leaf.
    """
    decayed = jax.tree.map(lambda spec: config.weight_decay_norms_and_embeddings or is_decayed(spec), axes)
    clip = config.gradient_clipping_threshold
    return optax.chain(
        _clip_by_global_norm(clip) if clip else optax.identity(),
        _direction(config, axes),
        optax.add_decayed_weights(config.adam_weight_decay, decayed),
        _scale_by_learning_rate(schedule),
    )


def is_decayed(spec: PartitionSpec) -> bool:
    """Whether weight decay applies by default: to matrices, but not the token embedding, norms and biases.

    A matrix maps the residual stream (`embed`) to or from something. The embedding is the one with `vocab` first,
    an untied output head the one with `vocab` last.
    """
    return _matrix_sides(spec) is not None and spec[0] != "vocab"


def muon_dimensions(spec: PartitionSpec) -> MuonDimensionNumbers | None:
    """Which dimensions Muon flattens to one matrix's rows and columns; None where adamw takes the parameter.

    `layers` is in neither and so is a batch dimension: each layer is orthogonalised apart. The residual stream's
    side is one side of the matrix, all heads together the other.
    """
    sides = _matrix_sides(spec)
    return MuonDimensionNumbers(*sides) if sides and "vocab" not in spec else None


def _matrix_sides(spec: PartitionSpec) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The dimensions that are rows (inputs) and columns (outputs) of each layer's matrix; None if it is none."""
    embed = tuple(i for i, name in enumerate(spec) if name == "embed")
    other = tuple(i for i, name in enumerate(spec) if name != "embed" and name not in STACK_AXES)
    if not embed or not other:
        return None
    return (embed, other) if embed < other else (other, embed)


def _direction(config: OptimizerConfig, axes: Any) -> optax.GradientTransformation:
    """The update before weight decay and learning rate, still pointing uphill."""
    mu_dtype = config.mu_dtype
    adam = optax.scale_by_adam(config.adam_b1, config.adam_b2, config.adam_eps, mu_dtype=mu_dtype)
    match config.opt_type:
        case "adamw":
            return adam
        case "lion":
            return optax.scale_by_lion(config.adam_b1, config.adam_b2, mu_dtype=mu_dtype)
        case "sgd":
            return optax.trace(config.momentum, accumulator_dtype=mu_dtype) if config.momentum else optax.identity()
        case "adafactor":
            return optax.chain(optax.scale_by_factored_rms(), _clip_by_layer_rms(axes))
        case "muon":
            labels = jax.tree.map(lambda spec: "adam" if muon_dimensions(spec) is None else "muon", axes)
            return optax.partition({"muon": _muon(config, axes), "adam": adam}, labels)


def _muon(config: OptimizerConfig, axes: Any) -> optax.GradientTransformation:
    """Orthogonalised momentum, scaled to the RMS of an AdamW update whatever the matrix's shape."""

    def dimensions(updates: Any) -> Any:
        # `partition` puts an empty node where a leaf is not Muon's; the inner map leaves it as it is.
        return jax.tree.map(lambda spec, update: jax.tree.map(lambda _: muon_dimensions(spec), update), axes, updates)

    def scale(spec: PartitionSpec, update: Any) -> Any:
        return jax.tree.map(lambda u: u * (MUON_UPDATE_RMS * _longer_side(u, spec) ** 0.5), update)

    return optax.chain(
        scale_by_muon(beta=config.muon_beta, mu_dtype=config.mu_dtype, weight_dimension_numbers=dimensions),
        optax.stateless(lambda updates, _: jax.tree.map(scale, axes, updates)),
    )


def _longer_side(matrix: jax.Array, spec: PartitionSpec) -> int:
    """Rows or columns of one layer's matrix, the larger. An orthogonal matrix's RMS is one over its root."""
    return max(math.prod(matrix.shape[i] for i in side) for side in _matrix_sides(spec) or ((),))


def _clip_by_layer_rms(axes: Any, threshold: float = 1.0) -> optax.GradientTransformation:
    """Adafactor's update clipping (arXiv:1804.04235, section 6), each layer of a stack by its own RMS."""

    def clip(spec: PartitionSpec, update: jax.Array) -> jax.Array:
        dims = tuple(i for i in range(update.ndim) if i >= len(spec) or spec[i] not in STACK_AXES)
        rms = jnp.sqrt(jnp.mean(jnp.square(update.astype(jnp.float32)), axis=dims, keepdims=True))
        return (update / jnp.maximum(1.0, rms / threshold)).astype(update.dtype)

    return optax.stateless(lambda updates, _: jax.tree.map(clip, axes, updates))


def _clip_by_global_norm(threshold: float) -> optax.GradientTransformationExtraArgs:
    """Shrink the gradient to the threshold if its norm, which the caller gives, is larger (arXiv:1211.5063)."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        factor = jnp.minimum(1.0, threshold / extra["grad_norm"])
        return jax.tree.map(lambda u: (u * factor).astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _scale_by_learning_rate(schedule: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Turn the direction downhill, by the learning rate of the step that the caller names."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        rate = jnp.asarray(schedule(extra["step"]))
        return jax.tree.map(lambda u: -rate * u, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
