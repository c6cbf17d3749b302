"""The estimate of what activations take."""

import math

import pytest

from maxlite.config import ModelConfig
from maxlite.model import activation_bytes

LLAMA_70B = {
    "base_emb_dim": 8192,
    "base_num_query_heads": 64,
    "base_num_kv_heads": 8,
    "base_mlp_dim": 28672,
    "base_num_decoder_layers": 80,
    "head_dim": 128,
    "vocab_size": 128256,
}


def on_one_of(devices):
    return lambda shape, axes: math.prod(shape) // devices


def test_it_is_near_what_the_tpu_compiler_takes_for_70b():
    """Temporaries on v5p, 2 sequences of 8192 a device: 40.3 GB for MaxText 0.2.5, 48.1 GB for a plain sketch."""
    estimate = activation_bytes(ModelConfig(**LLAMA_70B), 256, 8192, on_one_of(128))
    assert 40e9 < estimate < 49e9


def test_it_shrinks_with_what_is_kept_and_with_chunks_of_the_loss():
    def bytes_with(**keys):
        return activation_bytes(ModelConfig(**LLAMA_70B | keys), 8, 8192, on_one_of(4))

    policies = ("full", "save_qkv_proj", "save_dot_except_mlp", "minimal", "none")
    sizes = [bytes_with(remat_policy=policy) for policy in policies]
    assert sizes == sorted(sizes)
    assert len(set(sizes[:4])) == 4
    whole, chunked = bytes_with(), bytes_with(loss_chunk_size=8192)
    assert whole - chunked == pytest.approx(7 / 8 * 2 * 2 * 8192 * 128256 * 4)
