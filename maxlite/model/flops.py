"""The size of a model and the arithmetic of a training step, from its config alone."""

from __future__ import annotations

from maxlite.config import ModelConfig


def matmul_parameters(config: ModelConfig) -> int:
    """Weights that every token is multiplied with: the kernels and the output head, tied or not."""
    query = config.base_num_query_heads * config.head_dim
    kv = config.base_num_kv_heads * config.head_dim
    attention = config.base_emb_dim * (2 * query + 2 * kv)
    mlp = 3 * config.base_emb_dim * config.base_mlp_dim
    return config.base_num_decoder_layers * (attention + mlp) + config.base_emb_dim * config.vocab_size


def num_parameters(config: ModelConfig) -> int:
    """Trained numbers in the model; a tied embedding counts once."""
    width, layers = config.base_emb_dim, config.base_num_decoder_layers
    query, kv = config.base_num_query_heads * config.head_dim, config.base_num_kv_heads * config.head_dim
    norms = (2 * layers + 1) * width
    attention_bias = layers * (query + 2 * kv + width) if config.attention_bias else 0
    mlp_bias = layers * (2 * config.base_mlp_dim + width) if config.mlp_bias else 0
    embedding = 0 if config.logits_via_embedding else config.vocab_size * width
    return matmul_parameters(config) + embedding + norms + attention_bias + mlp_bias


def train_step_flops(config: ModelConfig, tokens: int, sequence_length: int) -> float:
    """Model FLOPs of one optimizer update: what the mathematics asks for, recomputation not counted.

        6 * matmul_parameters * tokens  +  6 * layers * query_heads * head_dim * sequence_length * tokens

    A product of a weight with a token is 2 FLOPs forward and 4 backward. Attention's two products are 4 *
    query_heads * head_dim FLOPs for every pair of tokens, three times that with the backward pass, and causality
    halves the pairs: as in MaxText, and as in PaLM (arXiv:2204.02311, appendix B) but for the halving. The embedding
    lookup, norms, softmax and the optimizer are not counted.

    Args:
        config: the model.
        tokens: in the whole batch of the update, padding included.
        sequence_length: tokens that one sequence holds; packed documents count as one.
    """
    attention = config.base_num_decoder_layers * config.base_num_query_heads * config.head_dim * sequence_length
    return 6.0 * tokens * (matmul_parameters(config) + attention)


def attention_product_flops(config: ModelConfig, tokens: int, sequence_length: int) -> float:
    """FLOPs of one product between queries and keys, or as large, in one layer, halved for causality.

    `train_step_flops` counts six of them a layer; a kernel that computes weights again does more.

    Args:
        config: the model.
        tokens: in the whole batch.
        sequence_length: tokens that one sequence holds.
    """
    return float(config.base_num_query_heads * config.head_dim * sequence_length) * tokens
