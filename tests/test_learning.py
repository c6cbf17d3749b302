"""The trainer learns: one batch by heart, and Shakespeare as well as the public figure for its size."""

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from maxlite.config import Config, resolve
from maxlite.program import build_program, open_data

CONFIGS = Path(__file__).parents[1] / "configs"


def test_one_batch_is_learnt_by_heart(tmp_path):
    keys = [
        "run_name=r",
        "model_name=tiny-byte",
        "text_files=corpus:shakespeare",
        "tokenizer_type=byte",
        "max_target_length=32",
        "per_device_batch_size=4",
        "steps=150",
        "learning_rate=3e-3",
        "dtype=float32",
        f"data_cache_directory={tmp_path}",
    ]
    program = build_program(resolve(Config, None, keys, {}).config)
    with open_data(program) as data:
        batch = program.to_device(data.train_batch(1))
    state, flags = program.init_state(), program.agreement.to_device({})
    for _ in range(150):
        state, metrics = program.train_step(state, batch, flags)
    assert float(metrics["loss"]) < 0.05


@pytest.mark.slow
def test_shakespeare_by_bytes(tmp_path):
    arguments = [str(CONFIGS / "shakespeare.yml"), f"base_output_directory={tmp_path}", "run_name=r"]
    subprocess.run([sys.executable, "-m", "maxlite.train", *arguments], check=True, capture_output=True)
    last = json.loads((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2000
    # Nats per byte; the public figure for 4 layers of 4 heads, width 128, context 64, batch 12 is about 1.88.
    assert last["eval_loss"] <= 1.95


@pytest.mark.slow
def test_the_quickstart_learns_saves_continuously_and_says_how_to_go_on(tmp_path):
    def train():
        command = [
            sys.executable,
            "-m",
            "maxlite.train",
            str(CONFIGS / "quickstart.yml"),
            f"base_output_directory={tmp_path}",
        ]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    output = train()
    run = tmp_path / "quickstart"
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval_loss"] <= math.log(8192) - 3.2
    assert int(re.search(r"^saves committed +(\d+)$", output, re.MULTILINE)[1]) > 5
    sample = shlex.split(re.search(r"^sample +python (.*)$", output, re.MULTILINE)[1])
    text = subprocess.run([sys.executable, *sample], check=True, capture_output=True, text=True).stdout
    assert text.startswith("The people")
    assert len(text) > 100
    assert f"resuming from step {last['step']}: nothing left" in train()
