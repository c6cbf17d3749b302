"""Flags of all processes: true for all where true for one, at no cost while they do not change."""

import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.config import ParallelConfig
from maxlite.parallel import Agreement, make_mesh

NAMES = ("stop", "busy", "due")


@pytest.fixture(scope="module")
def agreement():
    return Agreement(make_mesh(ParallelConfig(), jax.devices()[:1]), NAMES)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), st.booleans()))
def test_one_process_agrees_with_itself(agreement, own):
    wanted = dict.fromkeys(NAMES, False) | own
    reduced = jax.jit(agreement.reduce)(agreement.to_device(own))
    assert {name: bool(value) for name, value in reduced.items()} == wanted
    # At once: what a step reduced earlier is older than what it knows itself.
    assert agreement.agreed(own, dict.fromkeys(NAMES, True)) == wanted
    assert agreement.agreed(own, None) == wanted


def test_flags_that_did_not_change_are_not_sent_again(agreement):
    assert agreement.to_device({"due": True}) is agreement.to_device({"due": True, "stop": False})
    assert agreement.to_device({"due": True}) is not agreement.to_device({})


def test_a_flag_that_is_none_is_a_mistake(agreement):
    with pytest.raises(ValueError, match="stopp: not among the flags stop, busy, due"):
        agreement.to_device({"stopp": True})


@pytest.mark.slow
def test_two_processes_agree_and_place_the_same_batch():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    script = Path(__file__).with_name("agree.py")
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(script), address, str(index)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    wanted = [{"stop": a or c, "save": b or d} for a, b, c, d in itertools.product((False, True), repeat=4)]
    for index, output in enumerate(outputs):
        found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))  # Gloo prints too
        assert found["agreed"] == wanted
        assert found["before"] == {"stop": False, "save": False}, "before a step one's own flag is nobody's"
        assert found["same"] is True, "what the primary said"
        half = [[0, 4], [4, 8]][index]
        rows = [half, [0, 8], half, [0, 8], [[0, 6], [2, 8]][index]]  # fsdp 4; context 4, 2 x 2; tensor 4; data 2
        assert found["batches"] == [[*each, True] for each in rows]
