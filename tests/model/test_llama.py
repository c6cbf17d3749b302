"""The network: layers stored one way and computed two, masks, dtypes, initial values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlite.config import ModelConfig
from maxlite.model import Llama, Placement, num_parameters, train_step_flops
from maxlite.model.remat import SAVED
from maxlite.parallel import DEFAULT_RULES

TINY = {
    "base_emb_dim": 16,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "base_mlp_dim": 24,
    "base_num_decoder_layers": 2,
    "vocab_size": 40,
    "dtype": "float32",
}


def build(**keys):
    """A tiny model with values from numpy: compiling its own initialisation would be most of the tests' time."""
    model = nnx.eval_shape(lambda: Llama(ModelConfig(**TINY | keys), rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(random.normal(scale=0.3, size=x.shape), x.dtype), state)
    return nnx.merge(graphdef, params)


@functools.partial(jax.jit, static_argnums=0)
def apply(graphdef, params, *arguments):
    return nnx.merge(graphdef, params)(*arguments)


def run(model, *arguments):
    """The logits, through jit: operation by operation is far slower to test."""
    return apply(*nnx.split(model), *arguments)


def tokens(batch, length, seed=1):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, TINY["vocab_size"])


def flat_parameters(model):
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model))}


def gradient(model, tokens_BS):
    graphdef, params = nnx.split(model)
    return jax.jit(jax.grad(lambda params: jnp.sum(nnx.merge(graphdef, params)(tokens_BS) ** 2)))(params)


def assert_trees_close(actual, expected, rtol=1e-4):
    """Close in relation to each array's largest element."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * float(jnp.abs(b).max() + 1e-6))


@pytest.mark.parametrize(
    ("keys", "paths"),
    [
        ({}, {"head.kernel": (16, 40)}),
        ({"logits_via_embedding": True}, {}),
        ({"attention_bias": True}, {"head.kernel": (16, 40), "layers.attention.key.bias": (2, 16)}),
        ({"mlp_bias": True}, {"head.kernel": (16, 40), "layers.mlp.down.bias": (2, 16)}),
    ],
)
def test_parameter_paths_shapes_and_axes_are_the_documented_ones(keys, paths):
    parameters = flat_parameters(build(**keys))
    always = {
        "embedding.table": (40, 16),
        "final_norm.scale": (16,),
        "layers.attention_norm.scale": (2, 16),
        "layers.attention.query.kernel": (2, 16, 32),
        "layers.attention.key.kernel": (2, 16, 16),
        "layers.attention.value.kernel": (2, 16, 16),
        "layers.attention.out.kernel": (2, 32, 16),
        "layers.mlp_norm.scale": (2, 16),
        "layers.mlp.gate.kernel": (2, 16, 24),
        "layers.mlp.up.kernel": (2, 16, 24),
        "layers.mlp.down.kernel": (2, 24, 16),
    }
    for path, shape in (always | paths).items():
        assert parameters[path].shape == shape
    kernels = {path for path in parameters if not path.endswith(".bias")}
    assert kernels == always.keys() | {path for path in paths if not path.endswith(".bias")}
    for path, leaf in parameters.items():
        axes = leaf.get_metadata("out_sharding")
        assert len(axes) == leaf.ndim
        assert (axes[0] == "layers") == path.startswith("layers.")
        assert ", ".join(axes) in _documented_axes(path)


def _documented_axes(path):
    import maxlite.model.llama as module

    stem, kind = path.rsplit(".", 1)
    line = next(line for line in module.__doc__.splitlines() if line.strip().startswith(stem + "."))
    return line[line.index("bias") :] if kind == "bias" else line.split("bias")[0]


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"logits_via_embedding": True, "attention_bias": True},
        {"mlp_bias": True, "base_num_kv_heads": 4, "attention_bias": True},
    ],
)
def test_num_parameters_is_the_real_count(keys):
    model = build(**keys)
    assert num_parameters(model.config) == sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))


def test_train_step_flops_of_a_case_worked_out_by_hand():
    config = ModelConfig(**TINY)
    weights = 2 * (16 * 32 + 2 * 16 * 16 + 32 * 16 + 3 * 16 * 24) + 16 * 40
    attention = 2 * 4 * 8 * 10
    assert train_step_flops(config, tokens=50, sequence_length=10) == 6 * 50 * (weights + attention)


def test_scanned_and_unrolled_layers_agree_on_the_same_parameters():
    scanned, unrolled = build(scan_layers=True), build(scan_layers=False)
    x = tokens(2, 9)
    np.testing.assert_allclose(run(scanned, x), run(unrolled, x), rtol=0, atol=1e-5)
    assert_trees_close(gradient(scanned, x), gradient(unrolled, x))


def test_remat_policies_give_the_same_gradient():
    x, expected = tokens(2, 7), gradient(build(remat_policy="none"), tokens(2, 7))
    for policy in SAVED:
        assert_trees_close(gradient(build(remat_policy=policy), x), expected)
    assert_trees_close(gradient(build(remat_policy="full", scan_layers=False), x), expected)


def test_remat_policies_keep_what_they_name():
    def products(policy):
        graphdef, params = nnx.split(build(remat_policy=policy, scan_layers=False, base_num_decoder_layers=1))
        loss = jax.grad(lambda params: jnp.sum(nnx.merge(graphdef, params)(tokens(1, 5))))
        return str(jax.make_jaxpr(loss)(params)).count("dot_general")

    none = products("none")
    # One layer: 7 maps and 2 attention products. What is kept is not computed again; the last product never is.
    assert products("full") > products("save_qkv_proj") > products("save_dot_except_mlp") > products("minimal") >= none


@pytest.mark.parametrize("keys", [{}, {"scan_layers": False}, {"base_num_kv_heads": 1}])
def test_a_later_token_never_changes_an_earlier_logit(keys):
    model, x = build(**keys), tokens(1, 8)
    changed = x.at[0, 5].set((x[0, 5] + 1) % TINY["vocab_size"])
    before, after = run(model, x), run(model, changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert not np.allclose(before[:, 5:], after[:, 5:])


def test_packed_documents_give_what_each_gives_alone():
    model, lengths = build(), (3, 5, 2)
    documents = [tokens(1, length, seed=length) for length in lengths]
    packed = jnp.concatenate([*documents, jnp.zeros((1, 2), jnp.int32)], axis=1)
    segments = jnp.array([[1] * 3 + [2] * 5 + [3] * 2 + [0] * 2])
    positions = jnp.array([[*range(3), *range(5), *range(2), 0, 0]])
    logits = run(model, packed, positions, segments)
    start = 0
    for document in documents:
        end = start + document.shape[1]
        np.testing.assert_allclose(logits[:, start:end], run(model, document), rtol=0, atol=1e-5)
        start = end
    assert np.isfinite(logits).all()  # padding too: NaN there would reach the gradients


def test_positions_matter_only_by_their_differences():
    model, x = build(), tokens(1, 6)
    shifted = run(model, x, jnp.arange(100, 106)[None])
    np.testing.assert_allclose(run(model, x), shifted, rtol=0, atol=1e-4)


def test_grouped_queries_are_plain_heads_with_repeated_keys_and_values():
    grouped, plain = build(), build(base_num_kv_heads=4)
    source, target = flat_parameters(grouped), flat_parameters(plain)
    for path, leaf in source.items():
        value = leaf[...]
        if path.split(".")[-2] in ("key", "value"):
            value = jnp.repeat(value.reshape(2, 16, 2, 8), 2, axis=2).reshape(2, 16, 32)
        target[path][...] = value
    x = tokens(2, 6)
    nnx.update(plain, nnx.from_flat_state([(tuple(path.split(".")), leaf) for path, leaf in target.items()]))
    np.testing.assert_allclose(run(plain, x), run(grouped, x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_compute_dtype_leaves_master_weights_and_logits_in_float32(dtype):
    model = build(dtype=dtype)
    logits, exact = run(model, tokens(2, 6)), run(build(), tokens(2, 6))
    assert logits.dtype == jnp.float32
    assert jax.eval_shape(model.hidden, tokens(2, 6)).dtype == dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient(model, tokens(2, 6)))} == {jnp.dtype("float32")}
    assert np.abs(logits - exact).max() < 0.1
    assert np.abs(logits - exact).max() > 0


def test_weight_dtype_is_the_dtype_of_the_parameters():
    state = nnx.state(build(weight_dtype="bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("bfloat16")}


def test_initial_values_are_the_documented_ones_inside_and_outside_jit():
    def init():
        return nnx.state(Llama(ModelConfig(**TINY | {"base_emb_dim": 128, "vocab_size": 500}), rngs=nnx.Rngs(0)))

    state, jitted = init(), jax.jit(init)()
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(jitted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    deviations = {
        "embedding.table": 128**-0.5,
        "head.kernel": 128**-0.5,
        "layers.attention.query.kernel": 128**-0.5,
        "layers.attention.out.kernel": (32 * 4) ** -0.5,
        "layers.mlp.down.kernel": (24 * 4) ** -0.5,
    }
    parameters = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}
    for path, deviation in deviations.items():
        assert np.std(parameters[path]) == pytest.approx(deviation, rel=0.05)
    assert not np.array_equal(*parameters["layers.mlp.up.kernel"])  # the layers differ


def test_constrain_sees_every_activation_with_a_name_per_dimension():
    seen = set()

    def constrain(x, axes):
        assert len(axes) == x.ndim
        seen.add(axes)
        return x

    model = Llama(ModelConfig(**TINY), rngs=nnx.Rngs(0), placement=Placement(constrain))
    jax.eval_shape(model, tokens(2, 4))
    named = {name for axes in seen for name in axes if name}
    assert named >= {"batch", "length", "embed", "heads", "kv_heads", "mlp", "vocab"}
    assert {f"activation_{name}" for name in named} <= DEFAULT_RULES.keys()
