"""Kernels: the mask holds in every one, and what cannot hold it is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.config import InputError, ModelConfig
from maxlite.model import choose_attention
from maxlite.model.attention import attend, dot_product


def config(attention="autoselected", **keys):
    return ModelConfig(attention=attention, **keys)


@pytest.mark.parametrize(
    ("platform", "keys", "length", "segmented", "kernel", "because"),
    [
        ("cpu", {}, 512, True, "dot_product", "only kernel on cpu"),
        ("tpu", {}, 512, True, "flash", "fastest"),
        ("tpu", {"head_dim": 32}, 512, True, "dot_product", "head_dim"),
        ("tpu", {}, 100, True, "dot_product", "multiple of 128 tokens"),
        ("gpu", {}, 512, False, "cudnn_flash_jax", "fastest"),
        ("gpu", {}, 512, True, "dot_product", "segment ids"),
        ("cuda", {"dtype": "float32"}, 512, False, "dot_product", "dtype=bfloat16"),
    ],
)
def test_autoselected_says_what_it_picked_and_why(platform, keys, length, segmented, kernel, because):
    choice = choose_attention(config(**keys), platform=platform, sequence_length=length, segmented=segmented)
    assert choice.kernel == kernel
    assert because in choice.reason


@pytest.mark.parametrize(
    ("attention", "platform", "keys", "length", "segmented", "problem"),
    [
        ("flash", "cpu", {}, 512, True, "runs on TPU only, and this is cpu"),
        ("flash", "tpu", {"dtype": "float16"}, 512, True, "set dtype=bfloat16"),
        ("flash", "tpu", {"head_dim": 80}, 512, True, "head_dim that is a multiple of 64, not 80"),
        ("flash", "tpu", {}, 1000, True, "change max_target_length"),
        ("cudnn_flash_jax", "tpu", {}, 512, False, "runs on NVIDIA GPUs only, and this is tpu"),
        ("cudnn_flash_jax", "gpu", {"dtype": "float32"}, 512, False, "set dtype=bfloat16"),
        ("cudnn_flash_jax", "gpu", {"head_dim": 256}, 512, False, "head_dim"),
        ("cudnn_flash_jax", "gpu", {}, 512, True, "packed documents"),
    ],
)
def test_a_kernel_that_cannot_is_refused_in_one_line(attention, platform, keys, length, segmented, problem):
    with pytest.raises(InputError) as error:
        choose_attention(config(attention, **keys), platform=platform, sequence_length=length, segmented=segmented)
    assert str(error.value).startswith(f"attention={attention} ")
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_a_named_kernel_that_can_is_taken():
    assert choose_attention(config("dot_product"), platform="tpu", sequence_length=7).kernel == "dot_product"
    assert choose_attention(config("flash"), platform="tpu", sequence_length=256).kernel == "flash"


def test_cudnn_is_never_run_without_the_mask():
    x = jnp.ones((1, 4, 1, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match="segment"):
        attend("cudnn_flash_jax", x, x, x, jnp.ones((1, 4), jnp.int32), config())


def one_token_at_a_time(q, k, v, segments):
    """Attention by its definition, in numpy float64."""
    batch, length, heads, width = q.shape
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for b in range(batch):
        for s in range(length):
            seen = [t for t in range(s + 1) if segments is None or segments[b, t] == segments[b, s]]
            for n in range(heads):
                kv = n * k.shape[2] // heads
                scores = k[b, seen, kv] @ q[b, s, n] / np.sqrt(width)
                weights = np.exp(scores - scores.max())
                out[b, s, n] = weights / weights.sum() @ v[b, seen, kv]
    return out


def queries_keys_values(batch, length, heads, kv_heads, width, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return [
        jax.random.normal(key, (batch, length, n, width))
        for key, n in zip(keys, (heads, kv_heads, kv_heads), strict=True)
    ]


@settings(max_examples=10, deadline=None)
@given(
    # 257: three blocks of queries, the last of one.
    shape=st.sampled_from([(5, 2, 2), (257, 2, 1), (130, 3, 1)]),
    cuts=st.lists(st.integers(0, 257), max_size=3),
)
def test_dot_product_is_attention_by_its_definition(shape, cuts):
    length, heads, kv_heads = shape
    q, k, v = queries_keys_values(1, length, heads, kv_heads, 4)
    segments = np.searchsorted(sorted(cuts), np.arange(length), side="right")[None] if cuts else None
    out = jax.jit(dot_product)(q, k, v, segments)
    np.testing.assert_allclose(out, one_token_at_a_time(q, k, v, segments), atol=2e-6)


def test_softmax_is_float32_under_bfloat16():
    q, k, v = queries_keys_values(1, 64, 2, 1, 8)
    low = dot_product(*(x.astype(jnp.bfloat16) for x in (q, k, v)), None)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(jnp.float32), dot_product(q, k, v, None), atol=0.05)
