"""Splash attention, the flash kernel for TPUs: its tiles, and its way onto every device's share.

Shapes as in `maxlite.model.attention`.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from maxlite.config import ModelConfig
from maxlite.model.placement import HEADS, KEY_TOKENS, KEYS, ONE_DEVICE, TOKENS, Placement

LANES = 128  # of a TPU vector register: tiles are multiples of it


def flash(
    q_BSNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BS: jax.Array | None,
    config: ModelConfig,
    placement: Placement = ONE_DEVICE,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Attention by the kernel; `interpret` runs it on any device, slowly, for tests.

    S must be a multiple of 128, and of 128 in each part where the length is split.
    """
    S = q_BSNH.shape[1]
    kernel = splash.make_splash_mha(
        # One causal mask for all heads, computed in the kernel; which of its tiles each part of the queries has to
        # look at is in the kernel's own arrays, of which every device gets its part.
        splash.MultiHeadMask([splash.CausalMask((S, S))]),
        block_sizes=block_sizes(config, S // placement.length_shards, S),
        head_shards=1,
        q_seq_shards=placement.length_shards,
        interpret=interpret,
    )
    tiles, structure = jax.tree.flatten(kernel)
    tile_axes = [(None, "length", None) if leaf.ndim == 3 else ("length",) for leaf in tiles]
    arguments, axes = [q_BSNH, k_BTKH, v_BTKH], [HEADS, KEYS, KEYS]
    if segment_ids_BS is not None:
        arguments, axes = [*arguments, segment_ids_BS, segment_ids_BS], [*axes, TOKENS, KEY_TOKENS]

    def share(*arguments: jax.Array) -> jax.Array:
        kernel = jax.tree.unflatten(structure, arguments[: len(tiles)])
        return jax.vmap(lambda *sequence: _one_sequence(kernel, *sequence))(*arguments[len(tiles) :])

    out_BSNH = placement.per_shard(share, (*tile_axes, *axes), HEADS)(*tiles, *arguments)
    return out_BSNH.astype(q_BSNH.dtype)


def _one_sequence(
    kernel: Any,
    q_SNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    ids_S: jax.Array | None = None,
    ids_T: jax.Array | None = None,
) -> jax.Array:
    ids = None if ids_S is None or ids_T is None else splash.SegmentIds(q=ids_S, kv=ids_T)
    q_NSH, k_KTH, v_KTH = (x.swapaxes(0, 1) for x in (q_SNH * q_SNH.shape[-1] ** -0.5, k_TKH, v_TKH))
    return kernel(q_NSH, k_KTH, v_KTH, segment_ids=ids).swapaxes(0, 1)


def block_sizes(config: ModelConfig, queries: int, keys: int) -> splash.BlockSizes:
    """The tiles named by the `sa_` keys, each made as small as its sequence asks for.

    Args:
        config: the model.
        queries: on one device, a multiple of 128.
        keys: as many.
    """
    block_kv, block_kv_dkv = _fit(config.sa_block_kv, keys), _fit(config.sa_block_kv_dkv, keys)
    fused = config.sa_use_fused_bwd_kernel
    return splash.BlockSizes(
        block_q=_fit(config.sa_block_q, queries),
        block_kv=block_kv,
        block_kv_compute=_fit(config.sa_block_kv_compute, block_kv),
        block_q_dkv=_fit(config.sa_block_q_dkv, queries),
        block_kv_dkv=block_kv_dkv,
        block_kv_dkv_compute=_fit(config.sa_block_kv_dkv_compute, block_kv_dkv),
        block_q_dq=None if fused else _fit(config.sa_block_q_dq, queries),
        block_kv_dq=None if fused else _fit(config.sa_block_kv_dq, keys),
        use_fused_bwd_kernel=fused,
    )


def _fit(block: int, length: int) -> int:
    """The largest multiple of 128 that divides `length` and is not over `block`."""
    return max(size for size in range(LANES, max(block, LANES) + 1, LANES) if length % size == 0)
