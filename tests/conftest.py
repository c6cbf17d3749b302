"""What every test gets: the CPU, no settings from the environment, and a way to run maxlite as a user does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

for name in [name for name in os.environ if name.startswith("M_")]:
    del os.environ[name]
os.environ["JAX_PLATFORMS"] = "cpu"

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
