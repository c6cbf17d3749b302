"""The training loss as sums, a chunk of tokens at a time, so that the logits of all tokens need not exist at once.

Shapes: B batch, S sequence, C positions per chunk, T = B * C tokens of one chunk (or B, C, as in
`Placement.tokens`), D width, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from maxlite.config import ModelConfig
from maxlite.model.llama import Llama
from maxlite.model.matmul import product, weight_gradient
from maxlite.model.placement import LOGITS, Placement

Sums: TypeAlias = tuple[jax.Array, jax.Array]  # of cross-entropy, of z-loss
Chunks: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


class LossSums(NamedTuple):
    """Sums over the valid targets of a batch, float32 scalars. Sums, so that they add up over batches.

    Only loss_sum + z_loss_sum may be differentiated, as training does; with z_loss_multiplier > 0 the gradient of
    any other combination of the two is NaN.
    """

    loss_sum: jax.Array  # cross-entropy, nats
    z_loss_sum: jax.Array  # z_loss_multiplier * log(Z)^2, to be added to the cross-entropy
    num_targets: jax.Array


def loss_sums(model: Llama, batch: Mapping[str, jax.Array], config: ModelConfig) -> LossSums:
    """The sums over one batch.

    Args:
        model: the model.
        batch: int [B, S] arrays with MaxText's names: `inputs`, `inputs_position`, `inputs_segmentation` (0 is
            padding), `targets`, `targets_segmentation` (0: the target is not counted).
        config: `loss_chunk_size` counts tokens of the whole batch; a chunk is the same span of every sequence, or
            of each device's part of every sequence, at least one position, so that a batch that is split over devices
            stays split. `z_loss_multiplier` is that of
            PaLM (arXiv:2204.02311), 1e-4 there.
    """
    x_BSD = model.hidden(batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"])
    valid_BS = (batch["targets_segmentation"] != 0).astype(jnp.float32)
    B, S = valid_BS.shape
    parts = model.placement.length_shards
    positions = (
        min(S // parts, max(1, config.loss_chunk_size // (B * parts))) if config.loss_chunk_size else S // parts
    )
    chunks = tuple(_chunk(x, positions, parts) for x in (x_BSD, batch["targets"], valid_BS))
    loss_sum, z_loss_sum = _head_loss(config.z_loss_multiplier, model.placement, model.head_matrix(), chunks)
    return LossSums(loss_sum, z_loss_sum, valid_BS.sum())


def _chunk(x: jax.Array, positions: int, parts: int) -> jax.Array:
    """[B, S, ...] to [chunks, B, C, ...], where C is `positions` of each of the `parts` of the sequence.

    The last chunk is filled with zeros, which are invalid targets.
    """
    B, S = x.shape[:2]
    chunks = -(-S // parts // positions)
    x = x.reshape(B, parts, S // parts, *x.shape[2:])
    x = jnp.pad(x, [(0, 0), (0, 0), (0, chunks * positions - S // parts)] + [(0, 0)] * (x.ndim - 3))
    x = jnp.moveaxis(x.reshape(B, parts, chunks, positions, *x.shape[3:]), 2, 0)
    return x.reshape(chunks, B, parts * positions, *x.shape[4:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _head_loss(z_multiplier: float, placement: Placement, w_DV: jax.Array, chunks: Chunks) -> Sums:
    """Sums of cross-entropy and z-loss, from the output head and the chunked hidden states, targets and validity."""

    def add(sums: Sums, chunk: Chunks) -> tuple[Sums, None]:
        loss, z_loss, _ = _chunk_loss(z_multiplier, placement, w_DV, chunk)
        return (sums[0] + loss, sums[1] + z_loss), None

    return jax.lax.scan(add, (jnp.float32(0), jnp.float32(0)), chunks)[0]


def _head_loss_forward(
    z_multiplier: float, placement: Placement, w_DV: jax.Array, chunks: Chunks
) -> tuple[Sums, tuple[jax.Array, jax.Array]]:
    """The sums, and the gradients of their sum, while a chunk's logits are at hand.

    The usual way, checkpointing each chunk, computes the logits once more in the backward pass: four products of
    the size of the head instead of three. Here the loss is the end of the program, so that its gradient is known
    up to one factor before the backward pass begins.
    """

    dtype = chunks[0].dtype
    # Cast and gathered once, not in every chunk; and cast first, for which the barrier is.
    low_w_DV = placement.constrain(jax.lax.optimization_barrier(w_DV.astype(dtype)), ("embed", "vocab"))

    def add(carry: tuple[jax.Array, jax.Array, jax.Array], chunk: Chunks) -> tuple[Any, jax.Array]:
        loss_sum, z_loss_sum, dw_DV = carry
        loss, z_loss, dlogits_TV = _chunk_loss(z_multiplier, placement, low_w_DV, chunk)
        x_BCD = chunk[0]
        dlogits_TV = dlogits_TV.astype(dtype)
        dx_TD = product("...V,DV->...D", dlogits_TV, low_w_DV).astype(dtype)
        dw_DV = dw_DV + weight_gradient(placement.tokens(x_BCD), dlogits_TV, placement)
        return (loss_sum + loss, z_loss_sum + z_loss, dw_DV), dx_TD.reshape(x_BCD.shape)

    zeros = (jnp.float32(0), jnp.float32(0), jnp.zeros(w_DV.shape, jnp.float32))
    (loss_sum, z_loss_sum, dw_DV), dx_chunks = jax.lax.scan(add, zeros, chunks)
    return (loss_sum, z_loss_sum), (dw_DV.astype(w_DV.dtype), dx_chunks)


def _head_loss_backward(
    z_multiplier: float, placement: Placement, gradients: tuple[jax.Array, jax.Array], cotangents: Sums
) -> tuple[jax.Array, tuple[jax.Array, None, None]]:
    factor, z_factor = cotangents
    if z_multiplier:
        factor = jnp.where(factor == z_factor, factor, jnp.nan)
    dw_DV, dx_chunks = (gradient * factor.astype(gradient.dtype) for gradient in gradients)
    return dw_DV, (dx_chunks, None, None)


_head_loss.defvjp(_head_loss_forward, _head_loss_backward)


def _chunk_loss(
    z_multiplier: float, placement: Placement, w_DV: jax.Array, chunk: Chunks
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One chunk's sum of cross-entropy, its sum of z-loss, and the gradient of both by its logits: float32 [T, V]."""
    x_BCD, targets_BC, valid_BC = chunk
    x_TD = placement.tokens(x_BCD)
    tokens = x_TD.shape[:-1]
    logits_TV = product("...D,DV->...V", x_TD, w_DV.astype(x_TD.dtype))
    logits_TV = placement.constrain(logits_TV.reshape(*x_BCD.shape[:2], -1), LOGITS).reshape(*tokens, -1)
    valid_T = valid_BC.reshape(tokens)
    target_T1 = targets_BC.reshape(*tokens, 1)
    log_z_T = jax.nn.logsumexp(logits_TV, axis=-1)
    is_target_TV = jax.lax.broadcasted_iota(jnp.int32, logits_TV.shape, logits_TV.ndim - 1) == target_T1
    if placement.split:  # each device looks among its own part of the vocabulary
        target_logit_T = jnp.sum(jnp.where(is_target_TV, logits_TV, 0), axis=-1)
    else:  # reads one logit, not V
        target_logit_T = jnp.take_along_axis(logits_TV, target_T1, axis=-1)[..., 0]
    loss = jnp.sum(valid_T * (log_z_T - target_logit_T))
    z_loss = z_multiplier * jnp.sum(valid_T * jnp.square(log_z_T))
    softmax_TV = jnp.exp(logits_TV - log_z_T[..., None])
    dlog_z_T = valid_T * (1 + 2 * z_multiplier * log_z_T)
    dlogits_TV = softmax_TV * dlog_z_T[..., None] - jnp.where(is_target_TV, valid_T[..., None], 0)
    return loss, z_loss, dlogits_TV
