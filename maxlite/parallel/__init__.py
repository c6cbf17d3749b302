"""The device mesh, the rules from logical axes to shardings, and the placement of batches, the processes."""

from maxlite.parallel.agreement import Agreement
from maxlite.parallel.batch import global_batch_size, process_rows, to_device
from maxlite.parallel.mesh import MeshPlan, make_mesh, plan_mesh, slice_of_devices
from maxlite.parallel.processes import Processes, ProcessLost
from maxlite.parallel.sharding import (
    DEFAULT_RULES,
    Rules,
    batch_sharding,
    batch_shards,
    bytes_per_device,
    constrain,
    length_shards,
    logical_rules,
    param_shardings,
    per_shard,
    share,
    summed_once,
)

__all__ = [
    "DEFAULT_RULES",
    "Agreement",
    "MeshPlan",
    "ProcessLost",
    "Processes",
    "Rules",
    "batch_sharding",
    "batch_shards",
    "bytes_per_device",
    "constrain",
    "global_batch_size",
    "length_shards",
    "logical_rules",
    "make_mesh",
    "param_shardings",
    "per_shard",
    "plan_mesh",
    "process_rows",
    "share",
    "slice_of_devices",
    "summed_once",
    "to_device",
]
