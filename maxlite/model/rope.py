"""Rotary position embedding (RoPE), plain and with the Llama 3.1 frequency scaling.

Shapes: B batch, S sequence, N heads, H head_dim.

Sources: Su et al. 2021, "RoFormer", arXiv:2104.09864; the Llama 3.1 scaling as in Meta's reference code and in
Hugging Face transformers' `rope_type: llama3`. The pairs that turn together are (i, i + H/2), Hugging Face's
half-rotation convention, so that its weights need no permutation.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per token of each rotating pair: float32 [head_dim / 2], `rope_max_timescale ** (-2 i / head_dim)`.

    With `rope_type: llama3.1`, pairs whose wavelength is over `original_max_position_embeddings /
    rope_low_freq_factor` tokens turn `rope_factor` times slower, those under `original / rope_high_freq_factor`
    are kept, and those between are interpolated linearly in original / wavelength.
    """
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequency = config.rope_max_timescale**-exponent
    if config.rope_type == "llama3.1":
        turns = config.original_max_position_embeddings * frequency / (2 * math.pi)  # in the original context
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequency = frequency * (kept + (1.0 - kept) / config.rope_factor)
    return frequency.astype(np.float32)


def rotation(positions_BS: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every position's angles, each float32 [B, S, 1, head_dim / 2]: once for all layers."""
    angles = positions_BS.astype(jnp.float32)[:, :, None, None] * inverse_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BSNH: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn queries or keys by `rotation(positions)`; computed in float32, returned in the dtype of `x_BSNH`."""
    cos, sin = cos_sin
    # Otherwise XLA would not round the projection to the compute dtype, and write and copy twice the bytes.
    x_BSNH = jax.lax.optimization_barrier(x_BSNH)
    first, second = jnp.split(x_BSNH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BSNH.dtype)
