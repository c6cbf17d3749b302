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
    {"tensor": 4, "data": 2},
    {"data": 2, "fsdp": 2, "tensor": 2, "micro_batches": 4},
    {"fsdp": 4, "tensor": 2, "opt": "muon"},
    {"context": 4, "fsdp": 2},
    {"context": 2, "tensor": 2, "data": 2, "micro_batches": 2, "loss_chunk_size": 64},
    {"slices": 2, "fsdp": 4},
    {"slices": 2, "fsdp": 2, "tensor": 2, "micro_batches": 2},
]
ONES = [{}, {"opt": "muon"}]


# Splash attention alone, in interpret mode: too slow, and its tiles too large, for a run.
FLASH = [
    {"fsdp": 2, "context": 4},
    {"data": 2, "context": 2, "tensor": 2, "keys": ["sa_block_kv=256", "sa_use_fused_bwd_kernel=true"]},
]


def name(plan):
    return "-".join(f"{key}{value}" for key, value in plan.items())


def sizes(plan):
    return [f"ici_{axis}_parallelism={plan.get(axis, 1)}" for axis in ("data", "fsdp", "context", "tensor")]


def keys(plan, devices):
    micro_batches = plan.get("micro_batches", 1)
    return [
        *sizes(plan),
        f"dcn_data_parallelism={plan.get('slices', 1)}",
        f"loss_chunk_size={plan.get('loss_chunk_size', 0)}",
        f"gradient_accumulation_steps={micro_batches}",
        f"per_device_batch_size={ROWS / micro_batches / devices}",
        f"opt_type={plan.get('opt', 'adamw')}",
    ]


@pytest.fixture(scope="module")
def results():
    """Plan -> result, for all plans, and those of `FLASH`, from one process with one device and one with eight."""
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
        asked = [keys(plan, devices) for plan in plans]
        if devices > 1:
            asked += [["flash", *sizes(plan), *plan.get("keys", ())] for plan in FLASH]
        process.stdin.write("".join(json.dumps(line) + "\n" for line in asked))
        process.stdin.close()
    found = {}
    for process, devices, plans in zip(processes, (1, 8), (ONES, PLANS), strict=True):
        with process.stdout as output:
            lines = [json.loads(line) for line in output]
        assert process.wait(timeout=60) == 0
        found["flash"] = [lines.pop() for _ in lines[len(plans) :]][::-1]
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
    share = plan.get("fsdp", 1) * plan.get("context", 1) * plan.get("tensor", 1)
    # Norm scales and counters are held whole.
    assert result["state_bytes_of_fullest_device"] < result["state_bytes"] * (1 / share + 0.02)
    assert result["alias_bytes"] == result["state_bytes_of_fullest_device"]
    assert result["donated"]


@pytest.mark.slow
@pytest.mark.parametrize("plan", [plan for plan in PLANS if "micro_batches" in plan], ids=name)
def test_micro_batches_are_taken_from_each_device_own_rows(results, plan):
    """Of the batch only token ids travel, to where the embedding's rows are, and the segments of keys to queries."""
    segments = 2 if "context" in plan else 0  # forward, and again backward
    assert len(results[name(plan)]["tokens_travel"]) <= 1 + segments


@pytest.mark.slow
@pytest.mark.parametrize("plan", [plan for plan in PLANS if "slices" in plan], ids=name)
def test_between_slices_only_the_gradient_travels_and_once_a_step(results, plan):
    """Each device's share of it, and single numbers: loss, count of targets, flags."""
    result = results[name(plan)]
    assert {(each["kind"], each["axis"]) for each in result["dcn"]} <= {
        ("all-reduce", "data"),
        ("all-reduce", "data,fsdp"),
        ("all-reduce", "data,fsdp,tensor"),
    }
    sums = 3 * 4  # of the loss, the z-loss and the number of targets
    flags = 4
    sent = sum(each["bytes"] for each in result["dcn"])
    assert result["params_bytes_of_a_device"] <= sent <= result["params_bytes_of_a_device"] + sums + flags


@pytest.mark.slow
def test_nothing_travels_between_slices_where_there_is_one(results):
    assert all(not results[name(plan)]["dcn"] for plan in PLANS if "slices" not in plan)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(FLASH)))
def test_flash_on_shares_agrees_with_plain_attention_on_one_device(results, index):
    for difference in results["flash"][index].values():
        assert difference < 1e-5  # of numbers about 1
