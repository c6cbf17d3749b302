"""The command: what it answers to bad input, before jax is loaded, and what it tries where a step does not fit."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from maxlite import compile as command
from maxlite.config import Config, Exit, InputError, resolve
from maxlite.topology import parse_topology

CONFIG = str(Path(__file__).parents[2] / "configs" / "llama3.1-70b.yml")


def config_of(*arguments):
    return resolve(Config, CONFIG, arguments, {}).config


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([CONFIG, "compile_topology=v5p-100"], ["compile_topology=v5p-100", "v5p-128"]),
        ([CONFIG, "compile_topology=null"], ["compile_topology needs a value", "v5p-128"]),
        ([CONFIG, "compile_topologi=v5p-8"], ["did you mean compile_topology"]),
        ([CONFIG, "compile_topology_num_slices=0"], ["compile_topology_num_slices=0", "at least 1"]),
        (
            [CONFIG, "compiled_trainstep_file=/nowhere/at/all"],
            ["compiled_trainstep_file=/nowhere/at/all", "directory"],
        ),
        ([], ["no config given", "usage:"]),
    ],
)
def test_bad_input_is_said_in_a_line(arguments, words, capsys):
    assert command.main(arguments) == Exit.BAD_INPUT
    answer = capsys.readouterr().err
    assert answer.startswith("error: ")
    assert all(word in answer for word in words)


def test_a_missing_compiler_is_said_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install .maxlite\[tpu\]"):
        command.require_topology(config_of())


def test_bad_input_is_answered_without_jax():
    code = (
        "import sys; from maxlite.compile import main; status = main(sys.argv[1:]); "
        "assert 'jax' not in sys.modules; sys.exit(status)"
    )
    arguments = [sys.executable, "-c", code, CONFIG, "compile_topology=v5p-100"]
    ran = subprocess.run(arguments, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert ran.returncode == Exit.BAD_INPUT, ran.stderr


# What libtpu says, 0.0.52 and older.
@pytest.mark.parametrize(
    ("message", "gib"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for "
            "HLO temporaries (23.84G) exceeds available HBM (15.75G). HLO module: jit__lambda.",
            23.84,
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
            "Used 17.53G of 15.75G hbm.",
            17.53,
        ),
    ],
)
def test_what_a_refused_step_needs_is_read_from_the_compiler(message, gib):
    assert command.refused_bytes(message) == pytest.approx(gib * 2**30, rel=1e-9, abs=1)


@pytest.mark.parametrize("message", ["INTERNAL: something", "RESOURCE_EXHAUSTED: no more file handles"])
def test_any_other_failure_is_not_taken_for_a_lack_of_memory(message):
    assert command.refused_bytes(message) is None


def test_the_changes_that_are_tried_need_less_memory_each():
    config = config_of("remat_policy=minimal", "loss_chunk_size=0", "per_device_batch_size=4")
    tried = command.changes(config, parse_topology("v5p-128"))
    assert tried == [
        {"loss_chunk_size": 4 * 128 * 8192 // 8},
        {"remat_policy": "full"},
        {"per_device_batch_size": "2"},
        {"per_device_batch_size": "1"},
        {"dcn_data_parallelism": 1, "dcn_fsdp_parallelism": -1},
        {"compile_topology": "v5p-256"},
    ]


def test_what_is_done_already_is_not_tried_again():
    config = config_of("per_device_batch_size=1", "compile_topology_num_slices=1", "loss_chunk_size=1024")
    tried = command.changes(config, parse_topology("v5p-128"))
    assert tried == [{"compile_topology": "v5p-256"}]


@pytest.mark.parametrize(
    ("enough", "keys"),
    [
        ({"per_device_batch_size": 1.0}, {"loss_chunk_size": 2 * 128 * 8192 // 8, "per_device_batch_size": "1"}),
        ({"per_device_batch_size": 0.5}, None),
    ],
)
def test_changes_are_compiled_one_after_another_until_one_fits(monkeypatch, capsys, enough, keys):
    tried = []

    def compiles(config, topology):
        tried.append(config)
        fits = all(config.flat()[key] == value for key, value in enough.items())
        return SimpleNamespace(fits=fits, hbm={"total": 12})

    monkeypatch.setattr(command, "compile_report", compiles)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    arguments = [CONFIG, "loss_chunk_size=0", "compiled_trainstep_file=step"]
    fix = command.find_fix(arguments, parse_topology("v5p-128"), config_of("loss_chunk_size=0"))
    assert fix == (None if keys is None else {"keys": keys, "total": 12})
    assert [config.model.loss_chunk_size for config in tried] == [2 * 128 * 8192 // 8] * len(tried)
    assert {config.compile.compiled_trainstep_file for config in tried} == {None}
    assert "does not fit; trying loss_chunk_size=" in capsys.readouterr().err
