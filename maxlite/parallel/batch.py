"""The global batch: its size, each process's rows, and its way to the devices."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import NamedSharding

from maxlite.config import InputError


def global_batch_size(
    per_device_batch_size: float, num_devices: int, gradient_accumulation_steps: int = 1, shards: int = 1
) -> int:
    """Rows (sequences) in one optimizer update: per_device_batch_size * devices * gradient_accumulation_steps.

    `per_device_batch_size` may be below 1: with 0.25 on 8 devices of which 4 share each row (tensor parallelism), a
    micro-batch has 2 rows.

    Args:
        per_device_batch_size: sequences per device and micro-batch.
        num_devices: devices in the mesh.
        gradient_accumulation_steps: micro-batches per update.
        shards: into how many parts a micro-batch's rows are split (`batch_shards`); each gets as many rows.

    Raises:
        InputError: a micro-batch is not a whole multiple of `shards` rows.
    """
    micro_batch = per_device_batch_size * num_devices
    rows = round(micro_batch)
    # 0.1 * 30 is 3.0000000000000004; a person who wrote it means 3.
    if not math.isclose(micro_batch, rows, rel_tol=1e-9) or rows % shards or rows == 0:
        parts = "" if shards == 1 else f" that split evenly over data x fsdp = {shards}"
        lower = math.floor(micro_batch / shards) * shards
        fits = [n / num_devices for n in (lower, lower + shards) if n]
        nearest = min(fits, key=lambda value: abs(value - per_device_batch_size))
        raise InputError(
            f"per_device_batch_size={per_device_batch_size:g} x {num_devices} devices = {micro_batch:g} rows in a "
            f"micro-batch, not whole rows{parts}; the nearest that fits is per_device_batch_size={nearest!r}"
        )
    return rows * gradient_accumulation_steps


def process_rows(sharding: NamedSharding, global_rows: int) -> slice:
    """The rows of the global batch that this process has to supply.

    Raises:
        InputError: this process's devices hold rows that are not consecutive.
    """
    parts = sharding.addressable_devices_indices_map((global_rows,)).values()
    bounds = sorted({part[0].indices(global_rows)[:2] for part in parts if part is not None})
    start, stop = bounds[0][0], bounds[-1][1]
    if sum(high - low for low, high in bounds) != stop - start:
        raise InputError(
            f"process {jax.process_index()} would hold rows {bounds} of the global batch, which are not consecutive; "
            "make ici_tensor_parallelism a divisor of the devices of one process"
        )
    return slice(start, stop)


def to_device(batch: Any, sharding: NamedSharding) -> Any:
    """Global arrays from this process's rows (`process_rows`): numpy arrays `[rows of this process, ...]`."""
    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, rows), batch)
