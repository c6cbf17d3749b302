"""Optimizers against numpy, and stacked layers against layers apart."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from maxlite.config import OptimizerConfig
from maxlite.training import make_optimizer
from maxlite.training.optimizers import is_decayed, muon_dimensions

KINDS = ("adamw", "adafactor", "lion", "sgd", "muon")
AXES = {
    "table": P("vocab", "embed"),
    "norm": P("layers", "norm"),
    "query": P("layers", "embed", "heads"),
    "query_bias": P("layers", "heads"),
    "out": P("layers", "heads", "embed"),
    "head": P("embed", "vocab"),
}
SHAPES = {
    "table": (11, 8),
    "norm": (3, 8),
    "query": (3, 8, 12),
    "query_bias": (3, 12),
    "out": (3, 12, 8),
    "head": (8, 11),
}
DECAYED = {"query", "out", "head"}


def tree(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: (rng.normal(size=shape) * scale).astype(np.float32) for name, shape in SHAPES.items()}


def updates(config, grads, params, steps=1, axes=AXES):
    """The last of `steps` updates with the same gradient."""
    optimizer = make_optimizer(config, lambda step: 0.1 / (1 + step), axes)
    state = optimizer.init(params)
    for step in range(steps):
        update, state = optimizer.update(grads, state, params, step=jnp.int32(step), grad_norm=optax.tree.norm(grads))
    return update


def dtypes(tree):
    return jax.tree.map(lambda x: x.dtype, tree)


def close(got, want, rtol=1e-5, atol=1e-7):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=rtol, atol=atol), got, want)


@pytest.mark.parametrize("clip", [0.0, 1.0, 1e6])
@pytest.mark.parametrize("decay_all", [False, True])
def test_two_updates_equal_numpy(clip, decay_all):
    params, grads = tree(0), tree(1)
    norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in grads.values()))
    b1, b2, decay, lr = 0.9, 0.95, 0.3, 0.05  # the second update's learning rate
    clipped = {k: g * (clip / norm if 0 < clip < norm else 1.0) for k, g in grads.items()}

    def adamw(g):
        mu, nu = (1 - b1) * g * (1 + b1), (1 - b2) * g**2 * (1 + b2)
        return (mu / (1 - b1**2)) / (np.sqrt(nu / (1 - b2**2)) + 1e-8)

    def lion(g):
        return np.sign((1 - b1) * g + b1 * (1 - b2) * g)

    def sgd(g):
        return g * (1 + 0.9)

    for kind, direction in (("adamw", adamw), ("lion", lion), ("sgd", sgd)):
        config = OptimizerConfig(
            opt_type=kind,
            gradient_clipping_threshold=clip,
            adam_weight_decay=decay,
            weight_decay_norms_and_embeddings=decay_all,
        )
        want = {
            k: -lr * (direction(g) + (decay * params[k] if decay_all or k in DECAYED else 0))
            for k, g in clipped.items()
        }
        close(updates(config, grads, params, steps=2), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("weight_dtype", "mu_dtype"), [("float32", None), ("float32", "bfloat16"), ("bfloat16", None)]
)
def test_lowers_a_quadratic_and_keeps_dtypes(kind, weight_dtype, mu_dtype):
    target = tree(2)
    params = jax.tree.map(lambda x: jnp.asarray(x, weight_dtype), tree(3))
    config = OptimizerConfig(opt_type=kind, adam_weight_decay=0.0, mu_dtype=mu_dtype)
    optimizer = make_optimizer(config, lambda step: 0.05, AXES)

    def loss(params):
        return sum(jnp.sum((params[k] - target[k]) ** 2) for k in params)

    @jax.jit
    def update(params, state):
        grads = jax.grad(loss)(params)
        change, state = optimizer.update(grads, state, params, step=0, grad_norm=optax.tree.norm(grads))
        return optax.apply_updates(params, change), state

    state = optimizer.init(params)
    before = float(loss(params))
    for _ in range(40):
        new_params, new_state = update(params, state)
        assert dtypes((new_params, new_state)) == dtypes((params, state))
        params, state = new_params, new_state
    assert float(loss(params)) < 0.6 * before
    # adafactor has no first moment; the second stays in the weights' dtype.
    moments = {str(x.dtype) for x in jax.tree.leaves(state) if x.ndim > 1}
    expected = {weight_dtype} if kind == "adafactor" else {mu_dtype or weight_dtype}
    assert expected <= moments <= expected | {weight_dtype}


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_layers_equal_layers_apart(kind):
    """The update of a stack is that of each layer by itself, also where statistics are taken over a whole array."""
    rng = np.random.default_rng(4)
    axes = {"up": P("layers", "embed", "mlp"), "down": P("layers", "mlp", "embed"), "norm": P("layers", "norm")}
    shapes = {"up": (3, 128, 160), "down": (3, 160, 128), "norm": (3, 128)}
    params = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    # Layers with very different gradients: statistics that mixed them would show.
    grads = {k: params[k][::-1] * np.float32([1, 30, 1000]).reshape(3, *[1] * (params[k].ndim - 1)) for k in params}
    config = OptimizerConfig(opt_type=kind, gradient_clipping_threshold=0)
    stacked = updates(config, grads, params, steps=2, axes=axes)

    one_axes = {k: P(*spec[1:]) for k, spec in axes.items()}
    for layer in range(3):
        one = updates(
            config, {k: g[layer] for k, g in grads.items()}, {k: p[layer] for k, p in params.items()}, 2, one_axes
        )
        close({k: u[layer] for k, u in stacked.items()}, one, rtol=2e-4, atol=2e-6)


def test_muon_equals_optax_on_plain_matrices():
    axes = {"up": P("embed", "mlp"), "norm": P("norm")}
    rng = np.random.default_rng(5)
    params = {"up": rng.normal(size=(8, 20)).astype(np.float32), "norm": rng.normal(size=8).astype(np.float32)}
    grads = {k: p[..., ::-1] for k, p in params.items()}
    config = OptimizerConfig(opt_type="muon", gradient_clipping_threshold=0, adam_weight_decay=0)
    reference = optax.contrib.muon(0.05, consistent_rms=0.2)
    state = reference.init(params)
    for _ in range(2):
        want, state = reference.update(grads, state, params)
    close(updates(config, grads, params, steps=2, axes=axes)["up"], want["up"], rtol=1e-4)


def test_muon_updates_are_orthogonal_and_of_rms_a_fifth():
    params, grads = tree(6), tree(7)
    config = OptimizerConfig(opt_type="muon", adam_weight_decay=0)
    for name in ("query", "out"):
        for layer in np.asarray(updates(config, grads, params)[name]) / -0.1:
            values = np.linalg.svd(layer, compute_uv=False) / (0.2 * np.sqrt(12))
            # Muon's iteration leaves singular values between about 0.7 and 1.2 (optax's docstring: 0.5 to 1.5).
            assert values.min() > 0.5
            assert values.max() < 1.5


def test_muon_takes_heads_together_in_four_dimensions():
    assert muon_dimensions(P("layers", "embed", "heads", "head_dim")) == ((1,), (2, 3))
    assert muon_dimensions(P("layers", "heads", "head_dim", "embed")) == ((1, 2), (3,))
    for name in ("table", "head", "norm", "query_bias"):
        assert muon_dimensions(AXES[name]) is None


def test_which_parameters_are_decayed():
    assert {name for name, spec in AXES.items() if is_decayed(spec)} == DECAYED
