"""What the activations of a step take: an estimate, for the plan that is shown before anything is compiled."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from maxlite.config import ModelConfig
from maxlite.model.placement import HEADS, KV_HEADS, LOGITS, MLP, RESIDUAL, Axes
from maxlite.model.remat import SAVED


def activation_bytes(
    config: ModelConfig, rows: int, length: int, elements: Callable[[tuple[int, ...], Axes], int]
) -> int:
    """Bytes on each device at the fullest moment, as a sum of

    - for every layer, what is kept for its backward pass: its input, and the outputs that `remat_policy` names (with
      `none`, all of them), in `dtype`;
    - one layer while its backward pass runs: all its outputs, and as much again for their gradients;
    - one chunk of the loss: its logits and their gradient, in float32.

    Attention's scores are left out (the flash kernels have none), as are weights that are gathered for one layer and
    what the compiler holds longer than it must. For Llama 3.1 70B, 2 sequences of 8192 a device, remat_policy full and
    whole logits it says 44 GB, where the TPU compiler took 40 GB for MaxText and 48 GB for a plain sketch.

    Args:
        config: the model.
        rows: of a micro-batch, on all devices.
        length: tokens in a row.
        elements: how many elements of an activation, by its shape and logical axes, a device holds.
    """
    heads, kv_heads, width = config.base_num_query_heads, config.base_num_kv_heads, config.head_dim
    residual = elements((rows, length, config.base_emb_dim), RESIDUAL)
    key = elements((rows, length, kv_heads, width), KV_HEADS)
    hidden = elements((rows, length, config.base_mlp_dim), MLP)
    outputs = {
        "query_proj": elements((rows, length, heads, width), HEADS),
        "key_proj": key,
        "value_proj": key,
        "out_proj": residual,
        "mlpwi_0": hidden,
        "mlpwi_1": hidden,
        "mlpwo": residual,
    }
    kept = SAVED.get(config.remat_policy, tuple(outputs))
    layers = config.base_num_decoder_layers * (residual + sum(outputs[name] for name in kept))
    one_layer = 2 * (residual + sum(outputs.values()))
    positions = min(length, max(1, config.loss_chunk_size // rows)) if config.loss_chunk_size else length
    logits = 2 * elements((rows, positions, config.vocab_size), LOGITS)
    return (layers + one_layer) * jnp.dtype(config.dtype).itemsize + logits * 4
