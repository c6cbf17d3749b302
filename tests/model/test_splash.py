"""Splash attention against dot_product: its tiles, its mask, its gradients, on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxlite.config import ModelConfig
from maxlite.model.attention import dot_product
from maxlite.model.splash import block_sizes, flash

TILE_KEYS = [name for name in ModelConfig.model_fields if name.startswith("sa_block")]
TILES = st.integers(1, 16).map(lambda n: 128 * n)


@given(
    tiles=st.fixed_dictionaries(dict.fromkeys(TILE_KEYS, TILES)),
    fused=st.booleans(),
    length=TILES,
    parts=st.integers(1, 4),
)
def test_tiles_divide_what_they_cut_and_are_no_larger_than_the_keys_say(tiles, fused, length, parts):
    config = ModelConfig(**tiles, sa_use_fused_bwd_kernel=fused)
    sizes = block_sizes(config, length, length * parts)
    for name, size in tiles.items():
        fitted = getattr(sizes, name.removeprefix("sa_"))
        if fused and name.endswith("_dq"):
            assert fitted is None
            continue
        whole = length if "_q" in name.removesuffix("_dq") else length * parts
        assert fitted % 128 == 0
        assert whole % fitted == 0
        assert fitted <= size
        if whole % size == 0 and not name.endswith("_compute"):
            assert fitted == size
    assert sizes.block_kv % sizes.block_kv_compute == 0
    assert sizes.block_kv_dkv % sizes.block_kv_dkv_compute == 0


def test_keys_have_effect():
    sizes = block_sizes(ModelConfig(sa_block_q=256, sa_block_kv_dkv=1024), 2048, 2048)
    assert (sizes.block_q, sizes.block_kv_dkv, sizes.block_kv) == (256, 1024, 512)


@pytest.mark.parametrize(
    ("packed", "keys"),
    [(False, {}), (True, {"sa_block_q": 128, "sa_block_kv_dkv": 128}), (True, {"sa_use_fused_bwd_kernel": True})],
)
def test_flash_agrees_with_dot_product_forward_and_backward(packed, keys):
    q, k, v = (jax.random.normal(jax.random.key(n), (2, 256, n, 64)) for n in (4, 2, 2))
    segments = jnp.array([[1] * 100 + [2] * 100 + [0] * 56, [1] * 3 + [2] * 253]) if packed else None

    def value_and_gradients(attention):
        def loss(q, k, v):
            return jnp.sum(jnp.sin(attention(q, k, v, segments)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q, k, v)

    config = ModelConfig(**keys)
    (value, gradients), (expected, expected_gradients) = (
        value_and_gradients(lambda *arguments: flash(*arguments, config, interpret=True)),
        value_and_gradients(dot_product),
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for a, b in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)
