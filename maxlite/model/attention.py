"""Causal attention over packed documents: the kernels, and which of them a run uses.

Shapes: B batch, S query sequence, T key sequence (the same tokens), N query heads, K key/value heads, G = N / K,
R = G * S the queries of one key head, H head_dim. Where the length is split over devices, S is one device's part.

Every kernel lets token s see token t when t <= s and segment_ids[s] == segment_ids[t]. One that cannot do that, or
cannot run on the device, dtype or head_dim, is refused by `choose_attention`; none is ever run without its mask.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlite.config import InputError, ModelConfig
from maxlite.model.matmul import product, transposed
from maxlite.model.placement import HEADS, KEY_TOKENS, KEYS, ONE_DEVICE, TOKENS, Placement
from maxlite.model.splash import LANES, flash

MAX_BLOCKS = 8  # of queries in dot_product: each is compiled apart


class AttentionChoice(NamedTuple):
    """The kernel a run uses, and a sentence that says why."""

    kernel: str
    reason: str


def _obstacle(
    kernel: str, config: ModelConfig, platform: str, sequence_length: int, segmented: bool, length_shards: int
) -> str | None:
    """Why this kernel cannot honour the mask or run here, with the fix; None when it can."""
    if kernel == "flash":
        if platform != "tpu":
            return f"runs on TPU only, and this is {platform}"
        if config.dtype == "float16":
            return "has no float16; set dtype=bfloat16"
        if config.head_dim % 64:
            return f"needs a head_dim that is a multiple of 64, not {config.head_dim}"
        if sequence_length % (LANES * length_shards):
            parts = f" in each of {length_shards} parts" if length_shards > 1 else ""
            return (
                f"needs sequences of a multiple of {LANES} tokens{parts}, not {sequence_length}; "
                "change max_target_length"
            )
    if kernel == "cudnn_flash_jax":
        if platform not in ("gpu", "cuda"):
            return f"runs on NVIDIA GPUs only, and this is {platform}"
        if config.dtype == "float32":
            return "has no float32; set dtype=bfloat16"
        if config.head_dim % 8 or config.head_dim > 128:
            return f"needs a head_dim that is a multiple of 8 and at most 128, not {config.head_dim}"
        if segmented:
            return "cannot keep packed documents apart (segment ids)"
        if length_shards > 1:
            return "cannot split a sequence over devices (context parallelism)"
    return None


def choose_attention(
    config: ModelConfig, *, platform: str, sequence_length: int, segmented: bool = True, length_shards: int = 1
) -> AttentionChoice:
    """The kernel for `config.attention` on `platform` ('cpu', 'gpu', 'cuda', 'tpu'), with the reason.

    Args:
        config: the model; `attention`, `dtype` and `head_dim` are read.
        platform: where the program will run, as in `jax.default_backend()`.
        sequence_length: tokens per sequence.
        segmented: whether sequences hold several documents, told apart by segment ids. Training batches do.
        length_shards: into how many parts each sequence is split over devices.

    Raises:
        InputError: the kernel named by `attention` cannot honour the mask, or cannot run there.
    """
    if config.attention != "autoselected":
        obstacle = _obstacle(config.attention, config, platform, sequence_length, segmented, length_shards)
        if obstacle:
            raise InputError(f"attention={config.attention} {obstacle}; or set attention=autoselected")
        return AttentionChoice(config.attention, "named by the key attention")
    fast = {"tpu": "flash", "gpu": "cudnn_flash_jax", "cuda": "cudnn_flash_jax"}.get(platform)
    if fast is None:
        return AttentionChoice("dot_product", f"the only kernel on {platform}")
    obstacle = _obstacle(fast, config, platform, sequence_length, segmented, length_shards)
    if obstacle:
        return AttentionChoice("dot_product", f"{fast} {obstacle}")
    return AttentionChoice(fast, f"the fastest kernel on {platform}")


def attend(
    kernel: str,
    q_BSNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BS: jax.Array | None,
    config: ModelConfig,
    placement: Placement = ONE_DEVICE,
) -> jax.Array:
    """Softmax attention with scale H ** -0.5, causal, inside segments: [B, S, N, H] in the dtype of the queries.

    Where the length is split, every device gathers the keys and values of whole sequences for its part of the
    queries. They are few beside the queries of grouped-query attention, and so cheaper to move than a ring is to wait
    for (Llama 3, arXiv:2407.21783, section 3.3.2).
    """
    if placement.length_shards > 1:
        k_BTKH, v_BTKH = placement.constrain(k_BTKH, KEYS), placement.constrain(v_BTKH, KEYS)
    if kernel == "flash":
        return flash(q_BSNH, k_BTKH, v_BTKH, segment_ids_BS, config, placement)
    if kernel == "cudnn_flash_jax":
        if segment_ids_BS is not None:  # choose_attention refuses this; never run without the mask
            raise ValueError("cudnn_flash_jax cannot honour segment ids")
        return jax.nn.dot_product_attention(q_BSNH, k_BTKH, v_BTKH, is_causal=True, implementation="cudnn")
    return dot_product(q_BSNH, k_BTKH, v_BTKH, segment_ids_BS, placement)


def dot_product(
    q_BSNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BS: jax.Array | None,
    placement: Placement = ONE_DEVICE,
) -> jax.Array:
    """Attention in plain XLA, softmax in float32.

    Queries go in up to 8 blocks, each against the keys it can see at all: near half of the score matrix is never
    computed, and what is computed stays in cache (2.7 times faster on CPU than the whole matrix at 512 tokens). On a
    part of the length the blocks see every key: which of them are too late is known only as it runs.
    """
    if placement.length_shards == 1:
        return _grouped(q_BSNH, k_BTKH, v_BTKH, Mask(None, segment_ids_BS, segment_ids_BS), placement.split)
    index_S = jnp.arange(q_BSNH.shape[1])
    arguments, axes = [q_BSNH, k_BTKH, v_BTKH, index_S], [HEADS, KEYS, KEYS, ("length",)]
    if segment_ids_BS is not None:
        arguments, axes = [*arguments, segment_ids_BS, segment_ids_BS], [*axes, TOKENS, KEY_TOKENS]

    def part(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        index_S: jax.Array,
        ids_BS: jax.Array | None = None,
        ids_BT: jax.Array | None = None,
    ) -> jax.Array:
        return _grouped(q, k, v, Mask(index_S, ids_BS, ids_BT), split=False)

    return placement.per_shard(part, tuple(axes), HEADS)(*arguments)


class Mask(NamedTuple):
    """What decides which token sees which.

    index_S: int, of each query among the keys; None: the queries are those of all keys, in order.
    ids_BS, ids_BT: int, the segments of queries and keys; None: all of one.
    """

    index_S: jax.Array | None
    ids_BS: jax.Array | None
    ids_BT: jax.Array | None

    def seen(self, block: slice, keys: int) -> int:
        """How many of the keys, from the first, a block of queries may see."""
        return block.stop if self.index_S is None else keys


def _grouped(q_BSNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, mask: Mask, split: bool) -> jax.Array:
    B, S, N, H = q_BSNH.shape
    K = k_BTKH.shape[2]
    q_BKGSH = q_BSNH.swapaxes(1, 2).reshape(B, K, N // K, S, H)
    out_BKGSH = _attention(q_BKGSH, k_BTKH.swapaxes(1, 2), v_BTKH.swapaxes(1, 2), mask, split)
    return out_BKGSH.reshape(B, N, S, H).swapaxes(1, 2)


def _blocks(length: int) -> list[slice]:
    size = max(128, -(-length // MAX_BLOCKS))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _rows(x_BKGSH: jax.Array) -> jax.Array:
    """A group's queries as rows of one matrix, so that the products are plain batched ones."""
    B, K, G, S, H = x_BKGSH.shape
    return x_BKGSH.reshape(B, K, G * S, H)


def _scores(q_BKGSH: jax.Array, k_BKTH: jax.Array, mask: Mask, block: slice) -> jax.Array:
    """Masked scores [B, K, G, S, T], float32, of one block of queries and the keys that it may see."""
    B, K, G, _, H = q_BKGSH.shape
    S, T = block.stop - block.start, mask.seen(block, k_BKTH.shape[2])
    scores_BKRT = product("BKRH,BKTH->BKRT", _rows(q_BKGSH[:, :, :, block]), k_BKTH[:, :, :T])
    index_S = block.start + jnp.arange(S) if mask.index_S is None else mask.index_S[block]
    mask_BST = (index_S[:, None] >= jnp.arange(T))[None]
    if mask.ids_BS is not None and mask.ids_BT is not None:
        mask_BST &= mask.ids_BS[:, block, None] == mask.ids_BT[:, None, :T]
    scores_BKGST = scores_BKRT.reshape(B, K, G, S, T) * H**-0.5
    # Finite, so that no row can give NaN; a token always sees itself, so the value never matters.
    return jnp.where(mask_BST[:, None, None], scores_BKGST, jnp.finfo(jnp.float32).min)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q_BKGSH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, mask: Mask, split: bool) -> jax.Array:
    return _attention_forward(q_BKGSH, k_BKTH, v_BKTH, mask, split)[0]


def _attention_forward(
    q_BKGSH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, mask: Mask, split: bool
) -> tuple[jax.Array, tuple[Any, ...]]:
    outs, log_zs = [], []
    for block in _blocks(q_BKGSH.shape[3]):
        scores_BKGST = _scores(q_BKGSH, k_BKTH, mask, block)
        max_BKGS1 = scores_BKGST.max(axis=-1, keepdims=True)
        weights_BKGST = jnp.exp(scores_BKGST - max_BKGS1)
        sum_BKGS1 = weights_BKGST.sum(axis=-1, keepdims=True)
        weights_BKRT = _rows(weights_BKGST.astype(v_BKTH.dtype))
        out_BKRH = product("BKRT,BKTH->BKRH", weights_BKRT, v_BKTH[:, :, : scores_BKGST.shape[-1]])
        outs.append(out_BKRH.reshape(*sum_BKGS1.shape[:-1], -1) / sum_BKGS1)
        log_zs.append(max_BKGS1 + jnp.log(sum_BKGS1))
    out_BKGSH = jnp.concatenate(outs, axis=3).astype(q_BKGSH.dtype)
    return out_BKGSH, (q_BKGSH, k_BKTH, v_BKTH, mask, out_BKGSH, jnp.concatenate(log_zs, axis=3))


def _attention_backward(
    split: bool, residuals: tuple[Any, ...], dout_BKGSH: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    """The weights are computed again and not kept, as in FlashAttention (arXiv:2205.14135, algorithm 4)."""
    q_BKGSH, k_BKTH, v_BKTH, mask, out_BKGSH, log_z_BKGS1 = residuals
    dtype, scale = q_BKGSH.dtype, q_BKGSH.shape[-1] ** -0.5
    inner_BKGS1 = (dout_BKGSH.astype(jnp.float32) * out_BKGSH.astype(jnp.float32)).sum(axis=-1, keepdims=True)
    dqs, dk_BKHT, dv_BKHT = [], jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    for block in _blocks(q_BKGSH.shape[3]):
        T = mask.seen(block, k_BKTH.shape[2])
        weights_BKGST = jnp.exp(_scores(q_BKGSH, k_BKTH, mask, block) - log_z_BKGS1[:, :, :, block])
        q_BKRH, dout_BKRH = _rows(q_BKGSH[:, :, :, block]), _rows(dout_BKGSH[:, :, :, block])
        dweights_BKRT = product("BKRH,BKTH->BKRT", dout_BKRH, v_BKTH[:, :, :T])
        dweights_BKGST = dweights_BKRT.reshape(weights_BKGST.shape) - inner_BKGS1[:, :, :, block]
        dscores_BKRT = _rows((weights_BKGST * dweights_BKGST * scale).astype(dtype))
        weights_BKRT = _rows(weights_BKGST.astype(dtype))
        dq_BKRH = product("BKRT,BKTH->BKRH", dscores_BKRT, k_BKTH[:, :, :T])
        dqs.append(dq_BKRH.reshape(q_BKGSH[:, :, :, block].shape))
        # Only the narrow operands are transposed; the scores stay as they are.
        unseen = [(0, 0), (0, 0), (0, 0), (0, k_BKTH.shape[2] - T)]
        dv_BKHT += jnp.pad(product("BKHR,BKRT->BKHT", transposed(dout_BKRH, split), weights_BKRT), unseen)
        dk_BKHT += jnp.pad(product("BKHR,BKRT->BKHT", transposed(q_BKRH, split), dscores_BKRT), unseen)
    dq_BKGSH = jnp.concatenate(dqs, axis=3).astype(dtype)
    return dq_BKGSH, dk_BKHT.mT.astype(k_BKTH.dtype), dv_BKHT.mT.astype(v_BKTH.dtype), None


_attention.defvjp(_attention_forward, _attention_backward)
