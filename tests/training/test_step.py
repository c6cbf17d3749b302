"""The train step: accumulation, refused updates, determinism, donation."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxlite.config import OptimizerConfig, ParallelConfig
from maxlite.parallel import make_mesh, param_shardings
from maxlite.training import (
    TrainState,
    abstract_state,
    create_state,
    init_state,
    jit_train_step,
    make_optimizer,
    make_schedule,
    make_train_step,
    state_shardings,
)

KINDS = ("adamw", "adafactor", "lion", "sgd", "muon")
V, D, F, L, S = 17, 8, 12, 2, 5
AXES = {
    "table": P("vocab", "embed"),
    "norm": P("layers", "norm"),
    "up": P("layers", "embed", "mlp"),
    "down": P("layers", "mlp", "embed"),
}


class Sums(NamedTuple):
    loss_sum: jax.Array
    z_loss_sum: jax.Array
    num_targets: jax.Array


def init_params():
    # Constants: jax.random would take longer to compile than the whole step.
    rng = np.random.default_rng(0)
    params = {
        "table": rng.normal(size=(V, D)),
        "norm": np.ones((L, D)),
        "up": rng.normal(size=(L, D, F)) * D**-0.5,
        "down": rng.normal(size=(L, F, D)) * F**-0.5,
    }
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)


def loss_fn(params, batch):
    """A tiny next-token model; `poison` adds its own value times a parameter to the loss."""
    layers = {name: params[name] for name in ("norm", "up", "down")}

    def layer(x, p):
        return x + jnp.tanh(x * p["norm"] @ p["up"]) @ p["down"], None

    x, _ = jax.lax.scan(layer, params["table"][batch["inputs"]], layers)
    logits = x @ params["table"].T
    valid = batch["valid"].astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    target = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    loss = jnp.sum((log_z - target) * valid)
    loss += jnp.sum(batch["poison"]) * params["norm"][0, 0]
    return Sums(loss, 1e-3 * jnp.sum(log_z**2 * valid), jnp.sum(valid))


def make_batch(seed=0, rows=8, share=0.7, poison=0.0):
    """Random tokens, of which about `share` are valid targets; `poison` in row 5."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, (rows, S + 1))
    valid = rng.random((rows, S)) < share
    poisons = np.where(np.arange(rows) == 5, np.float32(poison), np.float32(0))
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "valid": valid, "poison": poisons}


@functools.cache
def compiled(opt_type, micro_batches):
    """Step 0 as numpy arrays, the schedule and the jitted step, on one device."""
    config = OptimizerConfig(opt_type=opt_type, gradient_accumulation_steps=micro_batches, learning_rate=3e-2)
    mesh = make_mesh(ParallelConfig(), jax.devices()[:1])
    schedule = make_schedule(config, 20)
    optimizer = make_optimizer(config, schedule, AXES)
    abstract = abstract_state(init_params, optimizer)
    shardings = state_shardings(abstract, param_shardings(mesh, abstract.params, AXES))
    rows = NamedSharding(mesh, P("data"))
    step = jit_train_step(make_train_step(loss_fn, optimizer, schedule, config), shardings, rows)
    return to_numpy(create_state(init_params, optimizer, shardings)), schedule, step


def build(opt_type="adamw", micro_batches=1):
    start, _, step = compiled(opt_type, micro_batches)
    return jax.tree.map(jnp.array, start), step


def to_numpy(tree):
    return jax.tree.map(lambda x: np.array(x), tree)


def equal_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, to_numpy(a), to_numpy(b))


@functools.cache
def bare_step(micro_batches):
    """A step that subtracts the gradient itself."""
    config = OptimizerConfig(gradient_accumulation_steps=micro_batches)
    return jax.jit(make_train_step(loss_fn, optax.sgd(1.0), lambda step: 1.0, config))


def gradient(batch, micro_batches):
    """What the step hands to the optimizer, and its metrics."""
    params = init_params()
    new, metrics = bare_step(micro_batches)(TrainState(jnp.int32(0), params, optax.sgd(1.0).init(params)), batch)
    return to_numpy(jax.tree.map(lambda a, b: a - b, params, new.params)), to_numpy(metrics)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), micro_batches=st.sampled_from([2, 8]), share=st.floats(0, 1))
def test_accumulated_gradient_is_that_of_the_whole_batch(seed, micro_batches, share):
    """However unevenly the valid targets fall on the micro-batches, some of which may have none."""
    batch = make_batch(seed, share=share)
    batch["valid"][: seed % 8] = False
    whole, metrics = gradient(batch, 1)
    parts, metrics_of_parts = gradient(batch, micro_batches)
    jax.tree.map(lambda w, p: np.testing.assert_allclose(p, w, atol=1e-6), whole, parts)
    for name in ("loss", "z_loss", "grad_norm", "finite"):
        np.testing.assert_allclose(metrics_of_parts[name], metrics[name], rtol=1e-5)


def test_gradient_is_that_of_the_mean_over_valid_targets():
    batch = make_batch(3)

    def mean(params):
        sums = loss_fn(params, batch)
        return (sums.loss_sum + sums.z_loss_sum) / sums.num_targets

    want = jax.grad(mean)(init_params())
    got, metrics = gradient(batch, 8)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=1e-6), got, to_numpy(want))
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(to_numpy(want))))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)


@pytest.mark.parametrize("micro_batches", [1, 8])
def test_batch_without_targets_is_not_nan(micro_batches):
    batch = make_batch(share=0)
    got, metrics = gradient(batch, micro_batches)
    assert all((x == 0).all() for x in jax.tree.leaves(got))
    assert metrics["finite"]
    assert metrics["loss"] == metrics["z_loss"] == metrics["grad_norm"] == 0


@pytest.mark.parametrize(
    ("opt_type", "micro_batches"), [("adamw", 1), ("adamw", 4), ("adafactor", 1), ("lion", 1), ("sgd", 1), ("muon", 4)]
)
def test_loss_falls_on_one_batch(opt_type, micro_batches):
    state, step = build(opt_type, micro_batches)
    losses = []
    for _ in range(20):
        state, metrics = step(state, make_batch())
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.5
    assert int(state.step) == 20


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize(("opt_type", "micro_batches"), [("adamw", 1), ("adamw", 4), ("muon", 4)])
def test_non_finite_update_is_refused(poison, opt_type, micro_batches):
    """1e30: the loss is finite, the gradient norm is not. One bad row is enough."""
    state, step = build(opt_type, micro_batches)
    state, metrics = step(state, make_batch())
    assert metrics["finite"]
    kept = to_numpy((state.params, state.opt_state))

    state, metrics = step(state, make_batch(poison=poison))
    assert not metrics["finite"]
    assert np.isfinite(metrics["loss"]) == (poison == 1e30)
    equal_bits(kept, (state.params, state.opt_state))
    assert int(state.step) == 2

    state, metrics = step(state, make_batch())
    assert metrics["finite"]
    assert not np.array_equal(state.params["up"], kept[0]["up"])


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        *(({"opt_type": kind, "learning_rate": 3e38, "adam_weight_decay": 10.0}, "float32") for kind in KINDS),
        # Squares of gradients above 255: only the second moment overflows, and the update is 0.
        ({"learning_rate": 1e-4, "gradient_clipping_threshold": 0, "adam_eps": 1e-3}, "float16"),
    ],
    ids=[*KINDS, "float16"],
)
def test_update_to_a_state_that_is_not_finite_is_refused(keys, dtype):
    """Though loss and gradient norm are finite."""
    config = OptimizerConfig(lr_schedule_type="constant", warmup_steps_fraction=0, **keys)
    optimizer = make_optimizer(config, make_schedule(config, 20), AXES)

    def steep(params, batch):
        loss, *others = loss_fn(params, batch)
        return Sums(loss * 500, *others)

    train_step = make_train_step(steep, optimizer, make_schedule(config, 20), config)
    state = init_state(lambda: jax.tree.map(lambda x: x.astype(dtype), init_params()), optimizer)
    kept = to_numpy((state.params, state.opt_state))
    state, metrics = jax.jit(train_step, donate_argnums=0)(state, make_batch())
    assert np.isfinite([metrics["loss"], metrics["grad_norm"]]).all()
    assert not metrics["finite"]
    equal_bits(kept, (state.params, state.opt_state))
    assert int(state.step) == 1


def test_learning_rate_is_that_of_the_step_also_after_a_refused_update():
    state, step = build()
    schedule = compiled("adamw", 1)[1]
    for n in range(4):
        state, metrics = step(state, make_batch(poison=np.nan if n == 1 else 0))
        assert float(metrics["learning_rate"]) == pytest.approx(float(schedule(n)))


@pytest.mark.parametrize("opt_type", ["adamw", "muon"])
def test_cut_and_resumed_run_is_bitwise_the_run_never_cut(opt_type):
    def run(state, step, first, last):
        losses = []
        for n in range(first, last):
            state, metrics = step(state, make_batch(n))
            losses.append(float(metrics["loss"]))
        return state, losses

    whole, losses = run(*build(opt_type, 4), 0, 10)
    state, first = run(*build(opt_type, 4), 0, 5)
    saved = to_numpy(state)
    compiled.cache_clear()  # a new process compiles anew
    _, step = build(opt_type, 4)
    resumed, second = run(saved, step, 5, 10)
    assert losses == first + second
    equal_bits(whole, resumed)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_state_is_donated_whole(micro_batches):
    state, step = build(micro_batches=micro_batches)
    memory = step.lower(state, make_batch()).compile().memory_analysis()
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes == size
    step(state, make_batch())
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def test_update_needs_memory_for_the_gradient_and_no_second_state():
    def square(params, batch):
        return Sums(sum(jnp.sum(x * x * batch[0]) for x in params.values()), jnp.float32(0), jnp.float32(1))

    axes = {"up": P("embed", "mlp"), "table": P("vocab", "embed")}
    config = OptimizerConfig()
    optimizer = make_optimizer(config, lambda step: 0.1, axes)
    abstract = abstract_state(lambda: {name: jnp.zeros((512, 512)) for name in axes}, optimizer)
    step = jax.jit(make_train_step(square, optimizer, lambda step: 0.1, config), donate_argnums=0)
    memory = step.lower(abstract, jnp.ones(1)).compile().memory_analysis()
    gradient_bytes = 2 * 512 * 512 * 4
    assert memory.alias_size_in_bytes > 3 * gradient_bytes
    # The gradient, one array in passing, and a bool for each element; with a select in place of the branch it was
    # twice the gradient or more.
    assert memory.temp_size_in_bytes < 1.8 * gradient_bytes


def test_accumulation_needs_the_activations_of_one_micro_batch():
    """256 rows in 4 micro-batches take less than half the temporaries of 256 rows at once."""
    batch = make_batch(rows=256)
    temporaries = []
    for micro_batches in (1, 4):
        state, step = build(micro_batches=micro_batches)
        temporaries.append(step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes)
    assert temporaries[1] < temporaries[0] / 2


def test_rows_must_split_into_micro_batches():
    with pytest.raises(ValueError, match="6 rows do not split into gradient_accumulation_steps=8"):
        gradient(make_batch(rows=6), 8)
