"""What every test gets: the CPU, no settings from the environment, a way to run maxlite as a user
does, and the golden Llamas."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

for name in [name for name in os.environ if name.startswith("M_")]:
    del os.environ[name]
os.environ["JAX_PLATFORMS"] = "cpu"

settings.register_profile("busy machine", deadline=None)  # other tests run beside
settings.load_profile("busy machine")

# A model and a text so small that a step takes milliseconds.
TINY = [
    "model_name=tiny-byte",
    "base_emb_dim=32",
    "base_mlp_dim=64",
    "base_num_decoder_layers=2",
    "base_num_query_heads=2",
    "base_num_kv_heads=1",
    "head_dim=16",
    "dtype=float32",
    "remat_policy=none",
    "tokenizer_type=byte",
    "max_target_length=32",
    "per_device_batch_size=4",
    "learning_rate=3e-3",
    "log_period=5",
]


class Run:
    """`python -m maxlite.train` with one run directory, over and over."""

    def __init__(self, folder: Path, shared: Path):
        self.folder = folder
        self.directory = folder / "runs" / "r"
        text = folder / "text.jsonl"
        if not text.exists():
            words = ["the cat sat on the mat. ", "a dog ran in the fog. ", "rain fell on the plain. "]
            documents = ["".join(words[(i * j + j) % 3] for j in range(1, 40)) for i in range(1, 21)]
            text.write_text("".join(f'{{"text": "{document}"}}\n' for document in documents))
        self.arguments = [
            "run_name=r",
            f"base_output_directory={folder / 'runs'}",
            f"text_files={text}",
            f"data_cache_directory={shared / 'data'}",
            f"jax_cache_dir={shared / 'xla'}",
            *TINY,
        ]

    def start(self, *arguments, devices=1, stderr=subprocess.STDOUT):
        """A training process."""
        env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        command = [sys.executable, "-m", "maxlite.train", *self.arguments, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env)

    def train(self, *arguments, expect=0, devices=1):
        """Trains to the end and returns what was printed; the exit status must be `expect`."""
        process = self.start(*arguments, devices=devices)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == expect, output
        assert "Traceback" not in output, output
        return output


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def make_run(tmp_path, shared):
    """`make_run("a")` is a fresh run of the tiny model, as a user would start it."""

    def make(name):
        folder = tmp_path / name
        folder.mkdir()
        return Run(folder, shared)

    return make


FIXTURES = Path(__file__).parent / "fixtures"


@dataclass
class Golden:
    """One tiny Llama as Hugging Face transformers computes it (scripts/make_golden.py)."""

    model_keys: dict  # for ModelConfig
    weights: dict  # dotted path of our parameter -> float32 array
    prompt: np.ndarray  # [1, S]
    logits: np.ndarray  # [1, S, V], of the prompt
    tokens: np.ndarray  # [steps, B, S + 1], one training batch per step
    valid: np.ndarray  # [steps, B, S], targets that count
    losses: np.ndarray  # [steps], before each AdamW step
    grad_norms: np.ndarray  # [steps], before clipping


MODEL_KEYS = {
    "base_emb_dim": 48,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 24,
    "base_mlp_dim": 96,
    "base_num_decoder_layers": 2,
    "vocab_size": 131,
    "dtype": "float32",
}
LLAMA31 = {"rope_type": "llama3.1", "rope_factor": 8.0, "original_max_position_embeddings": 32}
CASES = {
    "gqa_untied": {},
    "gqa_tied": {"logits_via_embedding": True},
    "rope31_untied": LLAMA31,
    "rope31_tied": LLAMA31 | {"logits_via_embedding": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
}
LINEAR = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
NORM = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def convert(hf, keys):
    """Hugging Face's names and [out, in] matrices to our paths and stacked [layers, in, out]."""

    def stack(name):
        return np.stack([hf[f"model.layers.{i}.{name}"] for i in range(keys["base_num_decoder_layers"])])

    ours = {"embedding.table": hf["model.embed_tokens.weight"], "final_norm.scale": hf["model.norm.weight"]}
    for path, name in NORM.items():
        ours[f"layers.{path}.scale"] = stack(f"{name}.weight")
    for path, name in LINEAR.items():
        ours[f"layers.{path}.kernel"] = stack(f"{name}.weight").swapaxes(1, 2)
        if keys.get("attention_bias" if path.startswith("attention") else "mlp_bias"):
            ours[f"layers.{path}.bias"] = stack(f"{name}.bias")
    if not keys.get("logits_via_embedding"):
        ours["head.kernel"] = hf["lm_head.weight"].T
    return {path: value.astype(np.float32) for path, value in ours.items()}


@pytest.fixture(params=CASES)
def golden(request):
    keys = MODEL_KEYS | CASES[request.param]
    with np.load(FIXTURES / "llama_weights.npz") as shared, np.load(FIXTURES / f"llama_{request.param}.npz") as case:
        shared, case = dict(shared), dict(case)
    return Golden(
        model_keys=keys,
        weights=convert(shared, keys),
        prompt=shared["prompt"].astype(np.int32),
        logits=case["logits"],
        tokens=shared["tokens"].astype(np.int32),
        valid=shared["valid"],
        losses=case["losses"],
        grad_norms=case["grad_norms"],
    )
