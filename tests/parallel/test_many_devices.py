"""The same training run on one device and on eight, with a tiny Llama, in a process with simulated devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ONE = {"data": 1}
PLANS = [
    {"data": 8},
    {"fsdp": 8},
    {"fsdp": 8, "micro_batches": 2},
    {"tensor": 8},
    {"data": 2, "fsdp": 2, "tensor": 2, "micro_batches": 4},
    {"fsdp": 4, "tensor": 2, "opt": "muon"},
]
ONES = [ONE, ONE | {"micro_batches": 4}, ONE | {"opt": "muon"}]


def name(plan):
    return "-".join(f"{key}{value}" for key, value in plan.items())


@pytest.fixture(scope="module")
def results():
    """Plan -> result, for all plans, from one process with eight simulated CPU devices."""
    script = Path(__file__).with_name("many_devices.py")
    plans = "\n".join(json.dumps(plan) for plan in ONES + PLANS)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), "8"],
        input=plans,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {name(line["plan"]): line for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("plan", [*ONES[1:2], *PLANS], ids=name)
def test_losses_are_those_of_one_device(results, plan):
    one = results[name(ONE | ({"opt": plan["opt"]} if "opt" in plan else {}))]
    # Sums in another order: Muon's iteration, not AdamW's root, amplifies the last bits.
    np.testing.assert_allclose(results[name(plan)]["losses"], one["losses"], atol=1e-5)
    assert one["losses"][-1] != one["losses"][0]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=name)
def test_state_is_born_spread_and_donated(results, plan):
    result = results[name(plan)]
    assert result["born_as_planned"]
    share = plan.get("fsdp", 1) * plan.get("tensor", 1)
    # Norm scales and counters are held whole.
    assert result["state_bytes_of_fullest_device"] < result["state_bytes"] * (1 / share + 0.02)
    assert result["alias_bytes"] == result["state_bytes_of_fullest_device"]
    assert result["donated"]


@pytest.mark.slow
@pytest.mark.parametrize("plan", [plan for plan in PLANS if "micro_batches" in plan], ids=name)
def test_micro_batches_are_taken_from_each_device_own_rows(results, plan):
    assert results[name(plan)]["ids_travel"] == []
