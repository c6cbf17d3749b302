"""RoPE against formulas written another way."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxlite.config import ModelConfig
from maxlite.model.rope import inverse_frequencies, rotate, rotation

LLAMA31 = {"rope_type": "llama3.1", "rope_max_timescale": 500_000, "head_dim": 128}


def scaled_one_by_one(config):
    """Llama 3.1's rule as its three cases, one frequency at a time."""
    result = []
    for i in range(0, config.head_dim, 2):
        frequency = 1.0 / config.rope_max_timescale ** (i / config.head_dim)
        wavelength = 2 * math.pi / frequency
        original = config.original_max_position_embeddings
        if wavelength < original / config.rope_high_freq_factor:
            result.append(frequency)
        elif wavelength > original / config.rope_low_freq_factor:
            result.append(frequency / config.rope_factor)
        else:
            smooth = (original / wavelength - config.rope_low_freq_factor) / (
                config.rope_high_freq_factor - config.rope_low_freq_factor
            )
            result.append((1 - smooth) * frequency / config.rope_factor + smooth * frequency)
    return np.array(result)


@given(
    theta=st.sampled_from([1e4, 5e5]),
    factor=st.floats(1, 64),
    low=st.floats(0.5, 2),
    gap=st.floats(0.5, 8),
    original=st.integers(16, 16384),
)
def test_llama31_frequencies(theta, factor, low, gap, original):
    config = ModelConfig(
        **LLAMA31 | {"rope_max_timescale": theta},
        rope_factor=factor,
        rope_low_freq_factor=low,
        rope_high_freq_factor=low + gap,
        original_max_position_embeddings=original,
    )
    np.testing.assert_allclose(inverse_frequencies(config), scaled_one_by_one(config), rtol=1e-6)


def test_llama31_touches_only_long_wavelengths():
    plain = inverse_frequencies(ModelConfig(**LLAMA31 | {"rope_type": "default"}))
    scaled = inverse_frequencies(ModelConfig(**LLAMA31))
    assert scaled[0] == plain[0] == 1
    assert scaled[-1] == pytest.approx(plain[-1] / 8)


def test_rotation_turns_the_pair_i_and_i_plus_half_as_complex_numbers():
    config = ModelConfig(head_dim=8)
    x = jax.random.normal(jax.random.key(0), (1, 5, 2, 8))
    positions = jnp.array([[0, 3, 1, 50, 7]])
    turned = rotate(x, rotation(positions, config))
    pairs = np.asarray(x[..., :4]) + 1j * np.asarray(x[..., 4:])
    angles = np.asarray(positions)[0][:, None] * np.asarray([10_000 ** -(2 * i / 8) for i in range(4)])
    expected = pairs * np.exp(1j * angles)[None, :, None, :]
    np.testing.assert_allclose(turned, np.concatenate([expected.real, expected.imag], -1), atol=1e-5)


def test_rotation_is_computed_in_float32_whatever_the_dtype():
    x = jnp.ones((1, 1, 1, 8), jnp.bfloat16)
    turned = rotate(x, rotation(jnp.array([[4097]]), ModelConfig(head_dim=8)))
    assert turned.dtype == jnp.bfloat16
    assert float(turned[0, 0, 0, 0]) == pytest.approx(math.cos(4097) - math.sin(4097), abs=1e-2)
