"""What a decoder layer is made of: linear map, RMSNorm, attention block, SwiGLU.

Shapes: B batch, S sequence, T = B * S tokens, D width, N query heads, K key/value heads, H head_dim, F MLP width.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxlite.config import ModelConfig
from maxlite.model.attention import attend
from maxlite.model.matmul import matmul
from maxlite.model.placement import HEADS, KV_HEADS, MLP, Axes, Placement
from maxlite.model.rope import rotate


def parameter(value: jax.Array, axes: Axes, config: ModelConfig) -> nnx.Param:
    """A parameter in `weight_dtype` that carries its logical axes; the mesh axes are another part's business."""
    # eager_sharding would look the logical names up in a mesh at once; maxlite shards by out_shardings of jit.
    return nnx.Param(value.astype(config.weight_dtype), out_sharding=axes, eager_sharding=False)


class Linear(nnx.Module):
    """y = x @ kernel (+ bias) in the compute dtype; kernel [inputs, outputs].

    Weights: truncated normal of standard deviation `scale / sqrt(inputs)`; biases 0.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        axes: Axes,
        bias: bool,
        config: ModelConfig,
        placement: Placement,
        rngs: nnx.Rngs,
        scale: float = 1,
    ) -> None:
        initializer = jax.nn.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal")
        self.kernel = parameter(initializer(rngs.params(), (inputs, outputs), jnp.float32), axes, config)
        # A bias of width D is too small to be worth splitting, as a norm's scale is.
        bias_axis = "norm" if axes[-1] == "embed" else axes[-1]
        self.bias = parameter(jnp.zeros(outputs), (bias_axis,), config) if bias else None
        self.dtype = jnp.dtype(config.dtype)
        self.placement = placement

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        y_TD = matmul(self.placement.tokens(x_BSD).astype(self.dtype), self.kernel[...], self.placement)
        if self.bias is not None:
            y_TD = y_TD + self.bias[...].astype(self.dtype)
        return y_TD.reshape(*x_BSD.shape[:-1], y_TD.shape[-1])


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale, in float32, returned in the compute dtype (arXiv:1910.07467)."""

    def __init__(self, config: ModelConfig) -> None:
        self.scale = parameter(jnp.ones(config.base_emb_dim), ("norm",), config)
        self.epsilon = config.normalization_layer_epsilon
        self.dtype = jnp.dtype(config.dtype)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        x_BSD = x_BSD.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x_BSD), axis=-1, keepdims=True)
        normed_BSD = x_BSD * jax.lax.rsqrt(mean_square + self.epsilon)
        return (normed_BSD * self.scale[...].astype(jnp.float32)).astype(self.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with RoPE (arXiv:2305.13245)."""

    def __init__(self, config: ModelConfig, placement: Placement, rngs: nnx.Rngs) -> None:
        width, bias = config.base_emb_dim, config.attention_bias
        heads, kv_heads = config.base_num_query_heads * config.head_dim, config.base_num_kv_heads * config.head_dim
        self.query = Linear(width, heads, ("embed", "heads"), bias, config, placement, rngs)
        self.key = Linear(width, kv_heads, ("embed", "kv_heads"), bias, config, placement, rngs)
        self.value = Linear(width, kv_heads, ("embed", "kv_heads"), bias, config, placement, rngs)
        self.out = Linear(heads, width, ("heads", "embed"), bias, config, placement, rngs, residual_scale(config))
        self.head_dim = config.head_dim
        self.config = config
        self.placement = placement

    def __call__(
        self,
        x_BSD: jax.Array,
        cos_sin: tuple[jax.Array, jax.Array],
        segment_ids_BS: jax.Array | None,
        kernel: str,
    ) -> jax.Array:
        def heads(projection: Linear, name: str, axes: Axes) -> jax.Array:
            y = checkpoint_name(projection(x_BSD), name)
            return self.placement.constrain(y.reshape(*y.shape[:2], -1, self.head_dim), axes)

        q_BSNH = rotate(heads(self.query, "query_proj", HEADS), cos_sin)
        k_BSKH = rotate(heads(self.key, "key_proj", KV_HEADS), cos_sin)
        v_BSKH = heads(self.value, "value_proj", KV_HEADS)

        out_BSNH = attend(kernel, q_BSNH, k_BSKH, v_BSKH, segment_ids_BS, self.config, self.placement)
        out_BSNH = self.placement.constrain(out_BSNH, HEADS)
        return checkpoint_name(self.out(out_BSNH.reshape(*out_BSNH.shape[:2], -1)), "out_proj")


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, placement: Placement, rngs: nnx.Rngs) -> None:
        width, hidden, bias = config.base_emb_dim, config.base_mlp_dim, config.mlp_bias
        self.gate = Linear(width, hidden, ("embed", "mlp"), bias, config, placement, rngs)
        self.up = Linear(width, hidden, ("embed", "mlp"), bias, config, placement, rngs)
        self.down = Linear(hidden, width, ("mlp", "embed"), bias, config, placement, rngs, residual_scale(config))
        self.placement = placement

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        gate_BSF = checkpoint_name(self.gate(x_BSD), "mlpwi_0")
        up_BSF = checkpoint_name(self.up(x_BSD), "mlpwi_1")
        hidden_BSF = self.placement.constrain(jax.nn.silu(gate_BSF) * up_BSF, MLP)
        return checkpoint_name(self.down(hidden_BSF), "mlpwo")


def residual_scale(config: ModelConfig) -> float:
    """Two sums per layer enter the residual stream: 1 / sqrt(2 layers) keeps its variance near 1 (GPT-2)."""
    return 1 / math.sqrt(2 * config.base_num_decoder_layers)
