"""The Llama family of decoders (Llama 2, 3, 3.1, 3.2, SmolLM2, ...): exactly Hugging Face's `LlamaForCausalLM`.

Parameter paths are part of the checkpoint format: a rename needs a migration. Every path, its shape and its logical
axes (in the Param's metadata: `nnx.get_partition_spec`). V = vocab_size, D = base_emb_dim, L =
base_num_decoder_layers, N = base_num_query_heads, K = base_num_kv_heads, H = head_dim, F = base_mlp_dim:

    embedding.table                [V, D]      vocab, embed
    layers.attention_norm.scale    [L, D]      layers, norm
    layers.attention.query.kernel  [L, D, N*H] layers, embed, heads        bias [L, N*H] layers, heads
    layers.attention.key.kernel    [L, D, K*H] layers, embed, kv_heads     bias [L, K*H] layers, kv_heads
    layers.attention.value.kernel  [L, D, K*H] layers, embed, kv_heads     bias [L, K*H] layers, kv_heads
    layers.attention.out.kernel    [L, N*H, D] layers, heads, embed        bias [L, D]   layers, norm
    layers.mlp_norm.scale          [L, D]      layers, norm
    layers.mlp.gate.kernel         [L, D, F]   layers, embed, mlp          bias [L, F]   layers, mlp
    layers.mlp.up.kernel           [L, D, F]   layers, embed, mlp          bias [L, F]   layers, mlp
    layers.mlp.down.kernel         [L, F, D]   layers, mlp, embed          bias [L, D]   layers, norm
    final_norm.scale               [D]         norm
    head.kernel                    [D, V]      embed, vocab                absent when logits_via_embedding

A `bias` is a sibling of its `kernel`, and is there only with attention_bias (the four attention maps) or mlp_bias
(the three MLP maps). Kernels are [inputs, outputs], the transpose of Hugging Face's `weight`; heads are contiguous
(head n owns columns n*H to (n+1)*H), in Hugging Face's order. The layers are stacked whatever `scan_layers` says.

Initial values: kernels truncated normal of standard deviation 1 / sqrt(inputs), `attention.out` and `mlp.down`
divided by sqrt(2 L) more; embedding normal of standard deviation 1 / sqrt(D), so that a tied head starts with
logits of variance about 1; norm scales 1; biases 0.

Shapes: B batch, S sequence, T = B * S tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from maxlite.config import ModelConfig
from maxlite.model.attention import choose_attention
from maxlite.model.layers import Attention, Linear, RMSNorm, SwiGLU, parameter
from maxlite.model.matmul import product
from maxlite.model.placement import (
    LOGITS,
    LOOKUP_BACK,
    LOOKUP_ROWS,
    LOOKUP_TABLE,
    LOOKUP_TOKENS,
    ONE_DEVICE,
    RESIDUAL,
    Placement,
)
from maxlite.model.remat import rematerialize
from maxlite.model.rope import rotation


class Embedding(nnx.Module):
    """One row of width D per token id."""

    def __init__(self, config: ModelConfig, placement: Placement, rngs: nnx.Rngs) -> None:
        shape = (config.vocab_size, config.base_emb_dim)
        table = jax.random.normal(rngs.params(), shape, jnp.float32) * config.base_emb_dim**-0.5
        self.table = parameter(table, ("vocab", "embed"), config)
        self.dtype = jnp.dtype(config.dtype)
        self.placement = placement

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        # Every device of fsdp looks up its part of the rows of all their tokens, and the parts go to where the tokens
        # are. A device has fewer tokens than the vocabulary has rows: to gather the table, and to hold its gradient
        # whole, would cost far more (8 GB for 70 B parameters).
        tokens_BS = self.placement.constrain(tokens_BS, LOOKUP_TOKENS)
        # Of its part of the rows' width each device has every row: the compiler breaks down (jax 0.12) over rows that
        # are spread where another axis is taken by `shard_map`.
        table_VD = self.placement.constrain(self.table[...], LOOKUP_TABLE)
        x_BSD = jnp.take(table_VD, tokens_BS, axis=0).astype(self.dtype)
        x_BSD = self.placement.constrain(x_BSD, LOOKUP_ROWS)
        # Back by one exchange of each axis: the compiler cannot see both at once, and would gather everything.
        return self.placement.constrain(x_BSD, LOOKUP_BACK)


class DecoderLayer(nnx.Module):
    """Pre-norm residual layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, placement: Placement, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, placement, rngs)
        self.mlp_norm = RMSNorm(config)
        self.mlp = SwiGLU(config, placement, rngs)
        self.placement = placement

    def __call__(
        self,
        x_BSD: jax.Array,
        cos_sin: tuple[jax.Array, jax.Array],
        segment_ids_BS: jax.Array | None,
        kernel: str,
    ) -> jax.Array:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos_sin, segment_ids_BS, kernel)
        x_BSD = x_BSD + self.mlp(self.mlp_norm(x_BSD))
        return self.placement.constrain(x_BSD, RESIDUAL)


class Llama(nnx.Module):
    """A Llama. Can be built inside jit, so that its parameters are born sharded.

    Args:
        config: the model's keys.
        rngs: the stream `params` gives the initial weights.
        placement: where activations lie.
        platform: where the program will run ('cpu', 'gpu', 'tpu'); None: `jax.default_backend()`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        placement: Placement = ONE_DEVICE,
        platform: str | None = None,
    ) -> None:
        @nnx.split_rngs(splits=config.base_num_decoder_layers)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stack(rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(config, placement, rngs)

        self.config = config
        self.placement = placement
        self.platform = platform or jax.default_backend()
        self.embedding = Embedding(config, placement, rngs)
        self.layers = stack(rngs)
        self.final_norm = RMSNorm(config)
        tied, width = config.logits_via_embedding, config.base_emb_dim
        self.head = (
            None if tied else Linear(width, config.vocab_size, ("embed", "vocab"), False, config, placement, rngs)
        )

    def __call__(
        self,
        tokens_BS: jax.Array,
        positions_BS: jax.Array | None = None,
        segment_ids_BS: jax.Array | None = None,
    ) -> jax.Array:
        """Logits of the next token: float32 [B, S, V]. Arguments as in `hidden`."""
        x_BSD = self.hidden(tokens_BS, positions_BS, segment_ids_BS)
        w_DV = self.head_matrix().astype(x_BSD.dtype)
        logits_TV = product("...D,DV->...V", self.placement.tokens(x_BSD), w_DV)
        return self.placement.constrain(logits_TV.reshape(*tokens_BS.shape, -1), LOGITS)

    def hidden(
        self,
        tokens_BS: jax.Array,
        positions_BS: jax.Array | None = None,
        segment_ids_BS: jax.Array | None = None,
    ) -> jax.Array:
        """The residual stream after the final norm: [B, S, D] in the compute dtype.

        Args:
            tokens_BS: int token ids, in [0, vocab_size).
            positions_BS: int positions for RoPE; None: 0, 1, 2, ... in every sequence.
            segment_ids_BS: int document of each token, 0 for padding; a token sees only earlier tokens of its own
                document. None: every sequence is one document.

        Raises:
            InputError: the attention kernel cannot honour the mask, or cannot run there.
        """
        choice = choose_attention(
            self.config,
            platform=self.platform,
            sequence_length=tokens_BS.shape[1],
            segmented=segment_ids_BS is not None,
            length_shards=self.placement.length_shards,
        )
        if positions_BS is None:
            positions_BS = jnp.broadcast_to(jnp.arange(tokens_BS.shape[1]), tokens_BS.shape)
        cos_sin = rotation(positions_BS, self.config)
        graphdef, stacked = nnx.split(self.layers)

        def layer(x_BSD: jax.Array, params: nnx.State) -> jax.Array:
            return nnx.merge(graphdef, params)(x_BSD, cos_sin, segment_ids_BS, choice.kernel)

        layer = rematerialize(layer, self.config)
        x_BSD = self.placement.constrain(self.embedding(tokens_BS), RESIDUAL)
        if self.config.scan_layers:
            x_BSD, _ = jax.lax.scan(lambda x, params: (layer(x, params), None), x_BSD, stacked)
        else:
            for index in range(self.config.base_num_decoder_layers):
                x_BSD = layer(x_BSD, jax.tree.map(lambda leaf: leaf[index], stacked))  # noqa: B023
        return self.final_norm(x_BSD)

    def head_matrix(self) -> jax.Array:
        """The output head [D, V] in `weight_dtype`: its own, or the transposed embedding when tied."""
        return self.embedding.table[...].T if self.head is None else self.head.kernel[...]
