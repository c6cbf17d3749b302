"""Rules to shardings, on abstract meshes: no devices needed."""

import logging

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlite.config import InputError, ModelConfig, OptimizerConfig
from maxlite.model import Llama
from maxlite.parallel import batch_sharding, batch_shards, constrain, param_shardings, per_shard
from maxlite.training import abstract_state, make_optimizer, state_shardings

MESH = AbstractMesh((2, 4, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
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
    assert find(found, "table") == P(("tensor",), ("fsdp",))
    assert find(found, "head", "kernel") == P(("fsdp",), ("tensor",))
    assert find(found, "query", "kernel") == P(None, ("fsdp",), ("tensor",))
    assert find(found, "out", "kernel") == P(None, ("tensor",), ("fsdp",))
    assert find(found, "down", "kernel") == P(None, ("tensor",), ("fsdp",))
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
    params = {"w": jax.ShapeDtypeStruct((6, 32), jnp.float32), "v": jax.ShapeDtypeStruct((6, 8), jnp.float32)}
    axes = {"w": P("embed", "mlp"), "v": P("embed", "heads")}
    with caplog.at_level(logging.WARNING):
        shardings = param_shardings(MESH, params, axes)
    assert shardings["w"].spec == P(None, ("tensor",))
    assert caplog.messages == [
        "parameters: embed of 6 is not a multiple of ici_fsdp_parallelism=4; each of these devices holds all of it"
    ]


def test_unknown_axis_and_wrong_number_of_axes_are_refused():
    param = {"w": jax.ShapeDtypeStruct((6, 32), jnp.float32)}
    with pytest.raises(ValueError, match="'embd' has no rule"):
        param_shardings(MESH, param, {"w": P("embd", None)})
    with pytest.raises(ValueError, match="1 logical axes"):
        param_shardings(MESH, param, {"w": P("embed")})


def test_batch_rows_go_over_data_and_fsdp():
    assert batch_shards(MESH) == 8
    assert batch_sharding(MESH) == NamedSharding(MESH, P(("data", "fsdp")))


def test_constrain_keeps_rows_apart_and_embed_whole(caplog):
    pin = constrain(MESH)

    def f(x, odd):
        y = pin(x, ("batch", "length", "embed"))
        z = pin(odd, ("batch", "length", "mlp"))
        pin(odd, ("batch", "length", "mlp"))
        return y, z

    jaxpr = jax.make_jaxpr(f)(jnp.zeros((8, 3, 16)), jnp.zeros((8, 3, 5)))
    given = [eqn.params["sharding"].spec for eqn in jaxpr.eqns]
    assert given[:2] == [P(("data", "fsdp"), None, None), P(("data", "fsdp"), None, None)]
    assert len(caplog.messages) == 1
    assert "mlp of 5 is not a multiple of ici_tensor_parallelism=2" in caplog.messages[0]


def test_kernel_is_given_a_device_share():
    seen = []

    def kernel(q, k):
        seen.extend([q.shape, k.shape])
        return q

    heads, kv_heads = ("batch", "length", "heads", None), ("batch", "length", "kv_heads", None)
    mapped = per_shard(MESH)(kernel, (heads, kv_heads), heads)
    q, k = (jax.ShapeDtypeStruct((16, 3, n, 5), jnp.float32) for n in (8, 2))
    assert jax.eval_shape(mapped, q, k).shape == q.shape
    assert seen == [(2, 3, 4, 5), (2, 3, 1, 5)]

    with pytest.raises(InputError, match="kv_heads of 3 is not a multiple of ici_tensor_parallelism=2"):
        jax.eval_shape(mapped, q, jax.ShapeDtypeStruct((16, 3, 3, 5), jnp.float32))
