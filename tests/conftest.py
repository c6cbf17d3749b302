"""What every test gets: the CPU, no settings from the environment, a way to run maxlite as a user
does, and the golden Llamas."""

import os
import re
import socket
import subprocess
import sys
import time
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

    def start(
        self, *arguments, devices=1, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, program=("-m", "maxlite.train")
    ):
        """A training process."""
        env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        command = [sys.executable, *program, *self.arguments, *arguments]
        return subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True, env=env)

    def train(self, *arguments, expect=0, devices=1):
        """Trains to the end and returns what was printed; the exit status must be `expect`."""
        process = self.start(*arguments, devices=devices)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == expect, output
        assert "Traceback" not in output, output
        return output

    @property
    def checkpoints(self):
        return self.directory / "checkpoints"

    def steps(self):
        """Those with the name of a checkpoint, oldest first."""
        return sorted(int(name) for name in self.left_in_checkpoints() if name.isdigit())

    def left_in_checkpoints(self):
        """Every name there."""
        try:
            return sorted(path.name for path in self.checkpoints.iterdir())
        except FileNotFoundError:
            return []

    def arrays(self, step):
        """Every array of a checkpoint as bytes."""
        from maxlite.checkpoint import load_arrays

        return {name: array.tobytes() for name, array in load_arrays(self.checkpoints / str(step)).items()}


class Several:
    """Processes of one device each that train a run together; what they print goes to files, to be read meanwhile."""

    def __init__(self, run, *arguments, count=2, of_one=(), programs=None):
        """`of_one`: arguments of process 1 alone. `programs`: what each runs, if not the trainer as it is."""
        self.run = run
        shared = ["per_device_batch_size=2", "log_period=1"]
        if count > 1:
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{listener.getsockname()[1]}"
            shared += [f"coordinator_address={address}", f"num_processes={count}"]
        self.processes = []
        for index in range(count):
            own = [f"process_id={index}", *arguments, *(of_one if index else ())]
            with self._log(index, "out").open("w") as out, self._log(index, "err").open("w") as err:
                options = {} if programs is None else {"program": programs[index]}
                self.processes.append(run.start(*shared, *own, stdout=out, stderr=err, **options))

    def _log(self, index, kind):
        return self.run.folder / f"{kind}{index}.txt"

    def output(self, index=0):
        """What a process printed so far. Gloo tells of its connections by itself."""
        text = self._log(index, "out").read_text(errors="replace")
        return "".join(re.findall(r"^(?!\[Gloo\]).*\n", text, re.MULTILINE))

    def errors(self, index=0):
        return self._log(index, "err").read_text(errors="replace")

    def printed(self):
        return [self.output(index) + self.errors(index) for index in range(len(self.processes))]

    def wait(self, reached, seconds=120):
        """Until `reached()`; all must be alive until then."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, self.printed()
            assert all(process.poll() is None for process in self.processes), self.printed()
            time.sleep(0.002)

    def wait_for_step(self, step):
        self.wait(lambda: self.newest_logged >= step)

    @property
    def newest_logged(self):
        return max(
            (int(step) for step in re.findall(r"^step (\d+)/\d+  loss ", self.output(), re.MULTILINE)), default=0
        )

    def end(self, timeout=120):
        """Waits for all: exit statuses, outputs, errors."""
        try:
            statuses = [process.wait(timeout=timeout) for process in self.processes]
        finally:
            self.kill()
        indices = range(len(self.processes))
        return statuses, [self.output(index) for index in indices], [self.errors(index) for index in indices]

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def start_several(make_run):
    """`start_several(arguments, run=, count=, of_one=, programs=)`: see `Several`; a fresh run where none is given."""
    started = []

    def start(*arguments, run=None, **options):
        started.append(Several(run or make_run(f"several{len(started)}"), *arguments, **options))
        return started[-1]

    yield start
    for several in started:
        several.kill()


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
