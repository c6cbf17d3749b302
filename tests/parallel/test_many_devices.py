"""The same training run on one device and on eight, with a tiny Llama, in processes with simulated devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("many_devices.py")
ROWS = 16
PLANS = [
    {"data": 8},
    {"fsdp": 8, "micro_batches": 2},
    {"tensor": 8},
    {"data": 2, "fsdp": 2, "tensor": 2, "micro_batches": 4},
    {"fsdp": 4, "tensor": 2, "opt": "muon"},
]
ONES = [{}, {"opt": "muon"}]


def name(plan):
    return "-".join(f"{key}{value}" for key, value in plan.items())


def keys(plan, devices):
    micro_batches = plan.get("micro_batches", 1)
    return [
        *(f"ici_{axis}_parallelism={plan.get(axis, 1)}" for axis in ("data", "fsdp", "tensor")),
        f"gradient_accumulation_steps={micro_batches}",
        f"per_device_batch_size={ROWS / micro_batches / devices}",
        f"opt_type={plan.get('opt', 'adamw')}",
    ]


@pytest.fixture(scope="module")
def results():
    """Plan -> result, for all plans, from one process with one device and one with eight simulated devices."""
    processes = []
    for devices, plans in ((1, ONES), (8, PLANS)):
        process = subprocess.Popen(
            [sys.executable, "-W", "error", str(SCRIPT), str(devices)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        processes.append(process)
        process.stdin.write("".join(json.dumps(keys(plan, devices)) + "\n" for plan in plans))
        process.stdin.close()
    found = {}
    for process, devices, plans in zip(processes, (1, 8), (ONES, PLANS), strict=True):
        with process.stdout as output:
            lines = [json.loads(line) for line in output]
        assert process.wait(timeout=60) == 0
        assert {line["devices"] for line in lines} == {devices}
        found |= {name(plan): line for plan, line in zip(plans, lines, strict=True)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=name)
def test_losses_are_those_of_one_device(results, plan):
    one = results[name({"opt": plan["opt"]} if "opt" in plan else {})]
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
