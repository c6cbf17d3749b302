"""One of two processes that agree on flags; run by test_agreement.py with an address and a process id.

Prints what both agreed on for every pair of flags that each process has in turn.
"""

import itertools
import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax

from maxlite.config import ParallelConfig
from maxlite.parallel import Agreement, Processes, make_mesh

NAMES = ("stop", "save")


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
            {"agreed": found, "before": agreement.agreed({"stop": True}, None), "same": processes.same(not index)}
        )
    )
