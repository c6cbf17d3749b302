"""How the model tells where its activations lie, in its own words: logical axes. It knows no mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import jax

Axes: TypeAlias = tuple[str | None, ...]
Constrain: TypeAlias = Callable[[jax.Array, Axes], jax.Array]
PerShard: TypeAlias = Callable[[Callable[..., jax.Array], tuple[Axes, ...], Axes], Callable[..., jax.Array]]

# Logical axes of the activations.
RESIDUAL = ("batch", "length", "embed")
HEADS = ("batch", "length", "heads", None)
KV_HEADS = ("batch", "length", "kv_heads", None)
KEYS = ("batch", None, "kv_heads", None)  # keys and values of whole sequences, which every query sees
MLP = ("batch", "length", "mlp")
TOKENS = ("batch", "length")
KEY_TOKENS = ("batch", None)
LOGITS = ("batch", "length", "vocab")
# While rows of the embedding are looked up, the devices that share the table have the same tokens.
LOOKUP_TOKENS = ("lookup_batch", None)
LOOKUP_TABLE = (None, "lookup_embed")
LOOKUP_BACK = ("batch", None, "lookup_width")
LOOKUP_ROWS = ("lookup_batch", None, "lookup_embed")


def _as_it_is(x: jax.Array, axes: Axes) -> jax.Array:
    return x


def _on_one_device(
    function: Callable[..., jax.Array], in_axes: tuple[Axes, ...], out_axes: Axes
) -> Callable[..., jax.Array]:
    return function


@dataclass(frozen=True)
class Placement:
    """Where activations lie; by default on one device.

    constrain: applied to an activation with its logical axes, says how it is split.
    per_shard: `per_shard(function, logical axes of each argument, logical axes of the result)` gives the function
        that runs `function` on every device's share (`jax.shard_map`), for what the compiler cannot split.
    length_shards: into how many parts the axis `length` is split.
    split: whether anything is split.
    """

    constrain: Constrain = _as_it_is
    per_shard: PerShard = _on_one_device
    length_shards: int = 1
    split: bool = False

    def tokens(self, x_BSD: jax.Array) -> jax.Array:
        """[B, S, D] as [B * S, D]; as it is where the length is split.

        XLA's CPU backend is fast with one dimension of tokens. TPU's moves a seventh more memory for it (copies from
        layout to layout), but without it computes the attention's projections once more, and FLOPs are what bounds a
        step. No sharding can express the tokens of a part of the rows and a part of the length as one dimension: the
        compiler would gather them.
        """
        return x_BSD if self.length_shards > 1 else x_BSD.reshape(-1, x_BSD.shape[-1])


ONE_DEVICE = Placement()
