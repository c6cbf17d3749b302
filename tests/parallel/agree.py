"""One of two processes of two devices; run by test_agreement.py with an address and a process id.

Prints what both agreed on for every pair of flags that each process has in turn, and what became of a batch whose
rows, or the length of each, are spread over the processes in several ways.
"""

import itertools
import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import numpy as np

from maxlite.config import ParallelConfig
from maxlite.parallel import Agreement, Processes, batch_sharding, make_mesh, process_rows, to_device

NAMES = ("stop", "save")
BATCH = np.arange(8 * 12, dtype=np.int32).reshape(8, 12)
PLANS = (
    {"fsdp": 4},
    {"fsdp": 1, "context": 4},
    {"fsdp": 2, "context": 2},
    {"fsdp": 1, "tensor": 4},
    {"fsdp": 1, "data": 2, "dcn_fsdp": 2},  # the devices of a process hold every other quarter of the rows
)


def place(plan):
    """The rows that this process supplies, and whether every device of it got its part of the batch."""
    keys = {name if "_" in name else f"ici_{name}": size for name, size in plan.items()}
    mesh = make_mesh(ParallelConfig(**{f"{name}_parallelism": size for name, size in keys.items()}))
    sharding = batch_sharding(mesh)
    rows = process_rows(sharding, len(BATCH))
    placed = to_device({"inputs": BATCH[rows]}, sharding)["inputs"]
    right = all(np.array_equal(shard.data, BATCH[shard.index]) for shard in placed.addressable_shards)
    return [rows.start, rows.stop, right and placed.shape == BATCH.shape and placed.sharding == sharding]


def report(error, process):
    raise error


index = int(sys.argv[2])
config = ParallelConfig(coordinator_address=sys.argv[1], num_processes=2, process_id=index)
with Processes(config, report) as processes:
    assert (processes.index, processes.count, processes.primary) == (index, 2, index == 0)
    agreement = Agreement(make_mesh(config), NAMES)
    reduce = jax.jit(agreement.reduce, in_shardings=agreement.sharding)
    found = []
    for flags in itertools.product((False, True), repeat=4):
        own = dict(zip(NAMES, flags[2 * index :], strict=False))
        found.append(agreement.agreed(own, jax.device_get(reduce(agreement.to_device(own)))))
    print(
        json.dumps(
            {
                "agreed": found,
                "before": agreement.agreed({"stop": True}, None),
                "same": processes.same(not index),
                "batches": [place(plan) for plan in PLANS],
            }
        )
    )
