"""The network computes what Hugging Face transformers' LlamaForCausalLM computes, from the same weights."""

import jax
import numpy as np
import pytest
from flax import nnx

from maxlite.config import ModelConfig
from maxlite.model.llama import Llama


def load(golden, **keys):
    """Our model with the golden weights; fails if a parameter is missing or left over."""
    model = Llama(ModelConfig(**golden.model_keys | keys), rngs=nnx.Rngs(0))
    left = dict(golden.weights)
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value = left.pop(".".join(path))
        assert param[...].shape == value.shape, path
        param[...] = jax.numpy.asarray(value)
    assert not left
    return model


@pytest.mark.parametrize("scan_layers", [True, False])
def test_logits(golden, scan_layers):
    logits = jax.jit(lambda model, tokens: model(tokens))(load(golden, scan_layers=scan_layers), golden.prompt)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, golden.logits, atol=1e-4, rtol=0)


def test_fixture_tells_a_wrong_rope_apart(golden):
    """The golden logits are sensitive enough that the test above would see the wrong RoPE."""
    wrong = {"default": "llama3.1", "llama3.1": "default"}[golden.model_keys.get("rope_type", "default")]
    logits = load(golden, rope_type=wrong, original_max_position_embeddings=32)(golden.prompt)
    assert np.abs(logits - golden.logits).max() > 1e-2
