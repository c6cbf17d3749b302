"""Rules to shardings, on abstract meshes: no devices needed."""

import logging

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlite.config import InputError, ModelConfig, OptimizerConfig, ParallelConfig
from maxlite.model import Llama
from maxlite.parallel import (
    batch_sharding,
    batch_shards,
    bytes_per_device,
    constrain,
    length_shards,
    logical_rules,
    param_shardings,
    per_shard,
    share,
)
from maxlite.parallel.mesh import MESH_AXES
from maxlite.training import abstract_state, make_optimizer, state_shardings

MESH = AbstractMesh((2, 4, 2, 2), MESH_AXES, axis_types=(AxisType.Auto,) * 4)
EMBED = ("fsdp", "context")
TINY = ModelConfig(
    base_emb_dim=16,
    base_num_query_heads=4,
    base_num_kv_heads=2,
    base_mlp_dim=32,
    base_num_decoder_layers=3,
    head_dim=4,
    vocab_size=64,
    attention_bias=True,
)


def llama_params(config=TINY):
    return nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))[1]


def specs(shardings):
    return {jax.tree_util.keystr(path): s.spec for path, s in jax.tree_util.tree_flatten_with_path(shardings)[0]}


def find(specs, *parts):
    [spec] = [spec for path, spec in specs.items() if all(f"'{part}'" in path for part in parts)]
    return spec


def test_llama_parameters():
    params = llama_params()
    found = specs(param_shardings(MESH, params, nnx.get_partition_spec(params)))
    assert find(found, "table") == P(("tensor",), EMBED)
    assert find(found, "head", "kernel") == P(EMBED, ("tensor",))
    assert find(found, "query", "kernel") == P(None, EMBED, ("tensor",))
    assert find(found, "out", "kernel") == P(None, ("tensor",), EMBED)
    assert find(found, "down", "kernel") == P(None, ("tensor",), EMBED)
    assert find(found, "query", "bias") == P(None, ("tensor",))
    assert find(found, "final_norm") == P(None)


@pytest.mark.parametrize("opt_type", ["adamw", "adafactor", "lion", "sgd", "muon"])
def test_optimizer_state_is_spread_as_the_parameters(opt_type):
    """Every array of the optimizer with more than a few elements is split, adafactor's factors too."""
    wide = TINY.model_copy(update={"base_emb_dim": 128, "base_mlp_dim": 256, "vocab_size": 128})
    params = llama_params(wide)
    axes = nnx.get_partition_spec(params)
    optimizer = make_optimizer(OptimizerConfig(opt_type=opt_type), lambda step: 0.1, axes)
    abstract = abstract_state(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params), optimizer)
    shardings = state_shardings(abstract, param_shardings(MESH, params, axes))
    assert shardings.step.spec == P()
    for leaf, sharding in zip(jax.tree.leaves(abstract.opt_state), jax.tree.leaves(shardings.opt_state), strict=True):
        sharding.shard_shape(leaf.shape)  # raises where the dimensions do not divide
        if leaf.size > 3 * 128 * 2:
            assert any(sharding.spec), (leaf.shape, sharding.spec)
    if opt_type == "adamw":
        adam = shardings.opt_state[1]
        assert specs(adam.mu) == specs(adam.nu) == specs(shardings.params)


def test_dimension_that_does_not_divide_is_whole_and_said(caplog):
    params = {"w": jax.ShapeDtypeStruct((6, 32), jnp.float32), "v": jax.ShapeDtypeStruct((4, 8), jnp.float32)}
    axes = {"w": P("embed", "mlp"), "v": P("embed", "heads")}
    with caplog.at_level(logging.WARNING):
        shardings = param_shardings(MESH, params, axes)
    assert shardings["w"].spec == P(None, ("tensor",))
    assert shardings["v"].spec == P(("fsdp",), ("tensor",))
    assert caplog.messages == [
        f"parameters: embed of {size} is not a multiple of fsdp 4 x context 2; devices along that axis hold the same"
        for size in (4, 6)
    ]


def test_unknown_axis_and_wrong_number_of_axes_are_refused():
    param = {"w": jax.ShapeDtypeStruct((6, 32), jnp.float32)}
    with pytest.raises(ValueError, match="'embd' has no rule"):
        param_shardings(MESH, param, {"w": P("embd", None)})
    with pytest.raises(ValueError, match="1 logical axes"):
        param_shardings(MESH, param, {"w": P("embed")})


def test_batch_rows_go_over_data_and_fsdp_and_their_length_over_context():
    assert batch_shards(MESH) == 8
    assert length_shards(MESH) == 2
    assert batch_sharding(MESH) == NamedSharding(MESH, P(("data", "fsdp"), ("context",)))


def test_rules_of_the_config_take_the_place_of_the_default():
    config = ParallelConfig(logical_axis_rules=[("embed", ["fsdp"]), ("activation_length", [])])
    rules = logical_rules(config)
    assert rules["embed"] == ("fsdp",)
    assert rules["mlp"] == ("tensor",)
    assert length_shards(MESH, rules) == 1
    assert batch_sharding(MESH, rules).spec == P(("data", "fsdp"), None)
    param = {"w": jax.ShapeDtypeStruct((8, 32), jnp.float32)}
    assert param_shardings(MESH, param, {"w": P("embed", "mlp")}, rules)["w"].spec == P(("fsdp",), ("tensor",))


@pytest.mark.parametrize(
    ("rules", "problems"),
    [
        ([("embd", ["fsdp"])], ["logical axis 'embd' is unknown; did you mean embed?"]),
        ([("embed", ["fdsp", "data"])], ["'embed': mesh axis 'fdsp' is unknown; did you mean fsdp?"]),
        ([("mlp", ["x"])], ["'mlp': mesh axis 'x' is unknown; known: data, fsdp, context, tensor"]),
        ([("mlp", ["data", "data"])], ["'mlp': mesh axis 'data' twice"]),
        ([("mlp", []), ("mlp", ["data"])], ["2 rules for 'mlp'; keep one"]),
    ],
)
def test_a_wrong_rule_is_one_line_with_the_nearest_names(rules, problems):
    with pytest.raises(InputError) as error:
        logical_rules(ParallelConfig(logical_axis_rules=rules))
    assert error.value.problems == tuple(f"logical_axis_rules: {problem}" for problem in problems)


def test_two_dimensions_of_one_array_over_one_mesh_axis_are_refused():
    rules = logical_rules(ParallelConfig(logical_axis_rules=[("mlp", ["fsdp"])]))
    param = {"w": jax.ShapeDtypeStruct((8, 32), jnp.float32)}
    with pytest.raises(InputError, match="'embed' and 'mlp' are dimensions of one array and cannot both"):
        param_shardings(MESH, param, {"w": P("embed", "mlp")}, rules)


def test_shares_of_a_device():
    params = {"w": jax.ShapeDtypeStruct((16, 32), jnp.float32), "v": jax.ShapeDtypeStruct((5,), jnp.bfloat16)}
    shardings = param_shardings(MESH, params, {"w": P("embed", "mlp"), "v": P("norm")})
    spread = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, shardings)
    assert bytes_per_device(spread) == 16 * 32 * 4 // (4 * 2 * 2) + 5 * 2
    assert share(MESH)((16, 6, 8), ("batch", "length", "mlp")) == 2 * 3 * 4


def test_constrain_keeps_rows_apart_and_embed_whole(caplog):
    pin = constrain(MESH)

    def f(x, odd):
        y = pin(x, ("batch", "length", "embed"))
        z = pin(odd, ("batch", "length", "mlp"))
        pin(odd, ("batch", "length", "mlp"))
        return y, z

    jaxpr = jax.make_jaxpr(f)(jnp.zeros((8, 4, 16)), jnp.zeros((8, 4, 5)))
    given = [eqn.params["sharding"].spec for eqn in jaxpr.eqns]
    assert given[:2] == [P(("data", "fsdp"), ("context",), None)] * 2
    assert len(caplog.messages) == 1
    assert "activation_mlp of 5 is not a multiple of tensor 2" in caplog.messages[0]


def test_kernel_is_given_a_device_share():
    seen = []

    def kernel(q, k):
        seen.extend([q.shape, k.shape])
        return q

    heads, kv_heads = ("batch", "length", "heads", None), ("batch", "length", "kv_heads", None)
    mapped = per_shard(MESH)(kernel, (heads, kv_heads), heads)
    q, k = (jax.ShapeDtypeStruct((16, 6, n, 5), jnp.float32) for n in (8, 2))
    assert jax.eval_shape(mapped, q, k).shape == q.shape
    assert seen == [(2, 3, 4, 5), (2, 3, 1, 5)]

    with pytest.raises(InputError, match="kv_heads of 3 is not a multiple of tensor 2"):
        jax.eval_shape(mapped, q, jax.ShapeDtypeStruct((16, 6, 3, 5), jnp.float32))
