"""The device mesh, the rules from logical axes to shardings, and the placement of batches, the processes."""

from maxlite.parallel.agreement import Agreement
from maxlite.parallel.batch import global_batch_size, process_rows, to_device
from maxlite.parallel.mesh import MeshPlan, make_mesh, plan_mesh
from maxlite.parallel.processes import Processes, ProcessLost
from maxlite.parallel.sharding import (
    batch_sharding,
    batch_shards,
    constrain,
    param_shardings,
    per_shard,
)

__all__ = [
    "Agreement",
    "MeshPlan",
    "ProcessLost",
    "Processes",
    "batch_sharding",
    "batch_shards",
    "constrain",
    "global_batch_size",
    "make_mesh",
    "param_shardings",
    "per_shard",
    "plan_mesh",
    "process_rows",
    "to_device",
]
