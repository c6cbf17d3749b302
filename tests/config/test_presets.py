"""Each preset is a valid ModelConfig and has the published number of parameters."""

from pathlib import Path

import pytest
import yaml

from maxlite.config.sections import ModelConfig

PRESETS = Path(__file__).parents[2] / "configs" / "models"

# As published: the sum of tensor sizes in each public checkpoint (a tied head is counted once).
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008,
}
TINY = {"tiny", "tiny-byte"}


def load(name):
    return ModelConfig(**yaml.safe_load((PRESETS / f"{name}.yml").read_text()))


def count(c):
    """Parameters of a Llama without biases, written out here so that it does not lean on the model's code."""
    attention = c.base_emb_dim * c.head_dim * (2 * c.base_num_query_heads + 2 * c.base_num_kv_heads)
    mlp = 3 * c.base_emb_dim * c.base_mlp_dim
    layer = attention + mlp + 2 * c.base_emb_dim
    embeddings = c.vocab_size * c.base_emb_dim * (1 if c.logits_via_embedding else 2)
    return embeddings + c.base_num_decoder_layers * layer + c.base_emb_dim


def test_every_preset_is_tested():
    assert {path.stem for path in PRESETS.glob("*.yml")} == PUBLISHED.keys() | TINY


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_count(name):
    assert count(load(name)) == PUBLISHED[name]


@pytest.mark.parametrize(("name", "most"), [("tiny", 8e6), ("tiny-byte", 1.5e6)])
def test_tiny_presets_are_tiny(name, most):
    assert 0 < count(load(name)) < most


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() | TINY))
def test_presets_hold_only_architecture(name):
    """How the network is computed (dtype, remat, kernels) is the run's business, not the preset's."""
    computed = {"weight_dtype", "dtype", "attention", "scan_layers", "remat_policy", "loss_chunk_size"}
    keys = yaml.safe_load((PRESETS / f"{name}.yml").read_text()).keys()
    assert keys <= ModelConfig.model_fields.keys() - computed


@pytest.mark.parametrize("name", [name for name in sorted(PUBLISHED) if name.startswith("llama3")])
def test_llama3_rope(name):
    c = load(name)
    assert c.rope_type == "llama3.1"
    assert c.rope_factor == (32 if name.startswith("llama3.2") else 8)
    assert (c.rope_low_freq_factor, c.rope_high_freq_factor, c.original_max_position_embeddings) == (1, 4, 8192)
    assert c.rope_max_timescale == 500_000
