"""Causal attention over packed documents: the kernels, and which of them a run uses.

Shapes: B batch, S query sequence, T key sequence (the same tokens), N query heads, K key/value heads, G = N / K,
R = G * S the queries of one key head, H head_dim.

Every kernel lets token s see token t when t <= s and segment_ids[s] == segment_ids[t]. One that cannot do that, or
cannot run on the device, dtype or head_dim, is refused by `choose_attention`; none is ever run without its mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from maxlite.config import InputError, ModelConfig

MAX_BLOCKS = 8  # of queries in dot_product: each is compiled apart
SPLASH_BLOCK = 512  # tokens; the largest tile used, the sequence length allowing
LANES = 128  # of a TPU vector register: splash tiles are multiples of it


class AttentionChoice(NamedTuple):
    """The kernel a run uses, and a sentence that says why."""

    kernel: str
    reason: str


def _obstacle(kernel: str, config: ModelConfig, platform: str, sequence_length: int, segmented: bool) -> str | None:
    """Why this kernel cannot honour the mask or run here, with the fix; None when it can."""
    if kernel == "flash":
        if platform != "tpu":
            return f"runs on TPU only, and this is {platform}"
        if config.dtype == "float16":
            return "has no float16; set dtype=bfloat16"
        if config.head_dim % 64:
            return f"needs a head_dim that is a multiple of 64, not {config.head_dim}"
        if sequence_length % LANES:
            return f"needs sequences of a multiple of {LANES} tokens, not {sequence_length}; change max_target_length"
    if kernel == "cudnn_flash_jax":
        if platform not in ("gpu", "cuda"):
            return f"runs on NVIDIA GPUs only, and this is {platform}"
        if config.dtype == "float32":
            return "has no float32; set dtype=bfloat16"
        if config.head_dim % 8 or config.head_dim > 128:
            return f"needs a head_dim that is a multiple of 8 and at most 128, not {config.head_dim}"
        if segmented:
            return "cannot keep packed documents apart (segment ids)"
    return None


def choose_attention(
    config: ModelConfig, *, platform: str, sequence_length: int, segmented: bool = True
) -> AttentionChoice:
    """The kernel for `config.attention` on `platform` ('cpu', 'gpu', 'cuda', 'tpu'), with the reason.

    Args:
        config: the model; `attention`, `dtype` and `head_dim` are read.
        platform: where the program will run, as in `jax.default_backend()`.
        sequence_length: tokens per sequence.
        segmented: whether sequences hold several documents, told apart by segment ids. Training batches do.

    Raises:
        InputError: the kernel named by `attention` cannot honour the mask, or cannot run there.
    """
    if config.attention != "autoselected":
        obstacle = _obstacle(config.attention, config, platform, sequence_length, segmented)
        if obstacle:
            raise InputError(f"attention={config.attention} {obstacle}; or set attention=autoselected")
        return AttentionChoice(config.attention, "named by the key attention")
    fast = {"tpu": "flash", "gpu": "cudnn_flash_jax", "cuda": "cudnn_flash_jax"}.get(platform)
    if fast is None:
        return AttentionChoice("dot_product", f"the only kernel on {platform}")
    obstacle = _obstacle(fast, config, platform, sequence_length, segmented)
    if obstacle:
        return AttentionChoice("dot_product", f"{fast} {obstacle}")
    return AttentionChoice(fast, f"the fastest kernel on {platform}")


def attend(
    kernel: str, q_BSNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segment_ids_BS: jax.Array | None
) -> jax.Array:
    """Softmax attention with scale H ** -0.5, causal, inside segments: [B, S, N, H] in the dtype of the queries."""
    if kernel == "flash":
        return flash(q_BSNH, k_BTKH, v_BTKH, segment_ids_BS)
    if kernel == "cudnn_flash_jax":
        if segment_ids_BS is not None:  # choose_attention refuses this; never run without the mask
            raise ValueError("cudnn_flash_jax cannot honour segment ids")
        return jax.nn.dot_product_attention(q_BSNH, k_BTKH, v_BTKH, is_causal=True, implementation="cudnn")
    return dot_product(q_BSNH, k_BTKH, v_BTKH, segment_ids_BS)


def dot_product(
    q_BSNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segment_ids_BS: jax.Array | None
) -> jax.Array:
    """Attention in plain XLA, softmax in float32.

    Queries go in up to 8 blocks, each against the keys it can see at all: near half of the score matrix is never
    computed, and what is computed stays in cache (2.7 times faster on CPU than the whole matrix at 512 tokens).
    """
    S = q_BSNH.shape[1]
    block = max(128, -(-S // MAX_BLOCKS))
    blocks = [
        _attend_block(q_BSNH[:, start : start + block], k_BTKH, v_BTKH, segment_ids_BS, start)
        for start in range(0, S, block)
    ]
    return jnp.concatenate(blocks, axis=1)


def _attend_block(
    q_BSNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segment_ids_BT: jax.Array | None, start: int
) -> jax.Array:
    """Attention of the queries that stand at `start` in the sequence."""
    B, S, N, H = q_BSNH.shape
    K, T = k_BTKH.shape[2], start + S
    k_BKTH, v_BKTH = (x[:, :T].swapaxes(1, 2) for x in (k_BTKH, v_BTKH))
    # A group's queries are rows of one matrix, so that the products are plain batched ones.
    q_BKRH = (q_BSNH * H**-0.5).swapaxes(1, 2).reshape(B, K, -1, H)
    scores_BKRT = jnp.einsum("BKRH,BKTH->BKRT", q_BKRH, k_BKTH, preferred_element_type=jnp.float32)
    mask_BST = (start + jnp.arange(S)[:, None] >= jnp.arange(T))[None]
    if segment_ids_BT is not None:
        mask_BST &= segment_ids_BT[:, start:T, None] == segment_ids_BT[:, None, :T]
    # Finite, so that no row can give NaN; a token always sees itself, so the value never matters.
    scores_BKGST = scores_BKRT.reshape(B, K, N // K, S, T)
    scores_BKGST = jnp.where(mask_BST[:, None, None], scores_BKGST, jnp.finfo(jnp.float32).min)
    weights_BKRT = jax.nn.softmax(scores_BKGST, axis=-1).astype(v_BKTH.dtype).reshape(scores_BKRT.shape)
    out_BKRH = jnp.einsum("BKRT,BKTH->BKRH", weights_BKRT, v_BKTH)
    return out_BKRH.reshape(B, N, S, H).swapaxes(1, 2)


def flash(
    q_BSNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BS: jax.Array | None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Splash attention, the TPU flash kernel; `interpret` runs it on any device, slowly, for tests.

    S must be a multiple of 128. Under a mesh call it inside `jax.shard_map`: GSPMD cannot split a Pallas kernel.
    """
    _, S, N, H = q_BSNH.shape
    block = next(size for size in (SPLASH_BLOCK, 256, LANES) if S % size == 0)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    mask = splash.MultiHeadMask([splash.CausalMask((S, S))] * N)
    kernel = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)

    def one_sequence(q_SNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, ids_S: jax.Array | None) -> jax.Array:
        ids = None if ids_S is None else splash.SegmentIds(q=ids_S, kv=ids_S)
        q_NSH, k_KTH, v_KTH = (x.swapaxes(0, 1) for x in (q_SNH * H**-0.5, k_TKH, v_TKH))
        out_NSH: Any = kernel(q_NSH, k_KTH, v_KTH, segment_ids=ids)
        return out_NSH.swapaxes(0, 1)

    in_axes = (0, 0, 0, None if segment_ids_BS is None else 0)
    return jax.vmap(one_sequence, in_axes=in_axes)(q_BSNH, k_BTKH, v_BTKH, segment_ids_BS).astype(q_BSNH.dtype)
