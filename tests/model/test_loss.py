"""The loss: chunks change nothing, invalid targets count for nothing, gradients are the real ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.config import ModelConfig
from maxlite.model import Llama, loss_sums

TINY = {
    "base_emb_dim": 8,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 1,
    "head_dim": 4,
    "base_mlp_dim": 12,
    "base_num_decoder_layers": 1,
    "vocab_size": 19,
    "dtype": "float32",
}
BATCH, LENGTH = 2, 7


def batch(seed=0, valid=None):
    tokens = jax.random.randint(jax.random.key(seed), (BATCH, LENGTH + 1), 0, TINY["vocab_size"])
    segments = jnp.array([[1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1]])
    return {
        "inputs": tokens[:, :-1],
        "inputs_position": jnp.array([[0, 1, 2, 0, 1, 2, 0], [*range(7)]]),
        "inputs_segmentation": segments,
        "targets": tokens[:, 1:],
        "targets_segmentation": segments if valid is None else jnp.asarray(valid),
    }


def both(sums):
    return sums.loss_sum + sums.z_loss_sum


def initial(config):
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    random = np.random.default_rng(0)
    return graphdef, jax.tree.map(lambda x: jnp.asarray(random.normal(scale=0.3, size=x.shape), x.dtype), state)


def sums_and_gradient(config, data, of=both):
    return _sums_and_gradient(config, of, *initial(config), data)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _sums_and_gradient(config, of, graphdef, params, data):
    def objective(params):
        sums = loss_sums(nnx.merge(graphdef, params), data, config)
        return of(sums), sums

    (_, sums), gradient = jax.value_and_grad(objective, has_aux=True)(params)
    return sums, gradient


def plain(config, data):
    """The loss from the model's own logits, differentiated by JAX."""
    return _plain(config.z_loss_multiplier, *initial(config), data)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _plain(z_loss_multiplier, graphdef, params, data):
    def objective(params):
        model = nnx.merge(graphdef, params)
        logits = model(data["inputs"], data["inputs_position"], data["inputs_segmentation"])
        valid = data["targets_segmentation"] != 0
        log_z = jax.nn.logsumexp(logits, axis=-1)
        target = jnp.take_along_axis(logits, data["targets"][..., None], axis=-1)[..., 0]
        cross_entropy = jnp.sum(jnp.where(valid, log_z - target, 0))
        z_loss = z_loss_multiplier * jnp.sum(jnp.where(valid, log_z**2, 0))
        return cross_entropy + z_loss, (cross_entropy, z_loss, jnp.sum(valid))

    (_, sums), gradient = jax.value_and_grad(objective, has_aux=True)(params)
    return sums, gradient


def assert_gradients_close(actual, expected, rtol):
    # Or 1e-7 of the largest: a gradient that is zero in exact arithmetic (queries that see one key) is all rounding.
    largest = max(float(jnp.abs(b).max()) for b in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * float(jnp.abs(b).max()) + 1e-7 * largest)


@pytest.mark.parametrize(
    ("chunk", "keys"),
    [
        (0, {}),
        (1, {"z_loss_multiplier": 1e-2}),  # less than one position of every sequence: one is taken
        (6, {"z_loss_multiplier": 1e-2, "logits_via_embedding": True}),  # three positions: 7 do not divide
        (100, {"z_loss_multiplier": 1e-2}),
    ],
)
def test_any_chunk_size_gives_the_plain_loss_and_gradient(chunk, keys):
    config, data = ModelConfig(**TINY, loss_chunk_size=chunk, **keys), batch()
    (sums, gradient), (expected, expected_gradient) = sums_and_gradient(config, data), plain(config, data)
    np.testing.assert_allclose(sums, expected, rtol=1e-6)
    assert_gradients_close(gradient, expected_gradient, 1e-5)


@settings(max_examples=30, deadline=None)
@given(valid=st.lists(st.booleans(), min_size=BATCH * LENGTH, max_size=BATCH * LENGTH), seed=st.integers(0, 99))
def test_any_set_of_valid_targets_gives_the_plain_loss_and_gradient(valid, seed):
    data = batch(seed, valid=np.reshape(valid, (BATCH, LENGTH)).astype(np.int32))
    config = ModelConfig(**TINY, loss_chunk_size=6, z_loss_multiplier=1e-2)
    (sums, gradient), (expected, expected_gradient) = sums_and_gradient(config, data), plain(config, data)
    np.testing.assert_allclose(sums, expected, rtol=1e-6)
    assert_gradients_close(gradient, expected_gradient, 1e-5)


def test_sums_are_float32_scalars_also_under_bfloat16():
    config = ModelConfig(**TINY | {"dtype": "bfloat16"}, loss_chunk_size=4, z_loss_multiplier=1e-3)
    sums, gradient = sums_and_gradient(config, batch())
    assert {(x.dtype, x.shape) for x in sums} == {(jnp.dtype("float32"), ())}
    expected, expected_gradient = plain(ModelConfig(**TINY, z_loss_multiplier=1e-3), batch())
    np.testing.assert_allclose(sums, expected, rtol=0.02)
    assert_gradients_close(gradient, expected_gradient, 0.1)


def test_the_loss_scales_its_gradient():
    config = ModelConfig(**TINY, loss_chunk_size=5, z_loss_multiplier=1e-2)
    _, gradient = sums_and_gradient(config, batch())
    _, third = sums_and_gradient(config, batch(), lambda sums: both(sums) / 3)
    assert_gradients_close(third, jax.tree.map(lambda x: x / 3, gradient), 1e-6)


def test_the_gradient_of_one_sum_without_the_other_is_loudly_wrong():
    config = ModelConfig(**TINY, z_loss_multiplier=1e-2)
    _, gradient = sums_and_gradient(config, batch(), lambda sums: sums.loss_sum)
    assert all(np.isnan(leaf).any() for leaf in jax.tree.leaves(gradient))
    _, gradient = sums_and_gradient(ModelConfig(**TINY), batch(), lambda sums: sums.loss_sum)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_a_batch_without_valid_targets_has_loss_and_gradient_zero():
    sums, gradient = sums_and_gradient(ModelConfig(**TINY), batch(valid=np.zeros((BATCH, LENGTH), np.int32)))
    assert all(x == 0 for x in sums)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient))


def test_whole_logits_never_exist_when_chunked():
    config = ModelConfig(**TINY, loss_chunk_size=BATCH)
    graphdef, params = initial(config)

    def objective(params):
        return loss_sums(nnx.merge(graphdef, params), batch(), config).loss_sum

    program = str(jax.make_jaxpr(jax.grad(objective))(params))
    assert f"f32[{BATCH},19]" in program
    assert f"f32[{BATCH * LENGTH},19]" not in program


def test_initial_loss_is_near_the_logarithm_of_the_vocabulary():
    config = ModelConfig(**TINY | {"base_emb_dim": 64})
    sums = jax.jit(lambda: loss_sums(Llama(config, rngs=nnx.Rngs(0)), batch(), config))()
    assert sums.loss_sum / sums.num_targets == pytest.approx(np.log(19) + 0.5, abs=0.7)
