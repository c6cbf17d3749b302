"""The global batch: its size, each process's rows, and its way to the devices."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

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
        parts = "" if shards == 1 else f" that split evenly into {shards} parts"
        lower = math.floor(micro_batch / shards) * shards
        fits = [n / num_devices for n in (lower, lower + shards) if n]
        nearest = min(fits, key=lambda value: abs(value - per_device_batch_size))
        raise InputError(
            f"per_device_batch_size={per_device_batch_size:g} x {num_devices} devices = {micro_batch:g} rows in a "
            f"micro-batch, not whole rows{parts}; the nearest that fits is per_device_batch_size={nearest!r}"
        )
    return rows * gradient_accumulation_steps


def process_rows(sharding: NamedSharding, global_rows: int) -> slice:
    """The rows of the global batch that this process has to supply: from the first to the last that its devices hold.

    Processes whose devices share rows, by tensor or context parallelism, each supply them.

    Args:
        sharding: of a batch, from `batch_sharding`.
        global_rows: in the batch.
    """
    rows = NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[0]))
    parts = rows.addressable_devices_indices_map((global_rows,)).values()
    bounds = [part[0].indices(global_rows) for part in parts if part is not None]
    return slice(min(low for low, _, _ in bounds), max(high for _, high, _ in bounds))


def to_device(batch: Any, sharding: NamedSharding) -> Any:
    """Global arrays from this process's rows (`process_rows`): numpy arrays `[rows of this process, length]`.

    Each device takes its rows, and its part of the length.
    """
    shards = sharding.num_devices // _copies(sharding)
    held = process_rows(sharding, shards)  # counted in shards: the same for every number of rows

    def place(rows: np.ndarray) -> jax.Array:
        size = rows.shape[0] // (held.stop - held.start)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "every device of this process holds a part"
            start, stop, _ = index[0].indices(shards * size)
            return rows[start - held.start * size : stop - held.start * size, *index[1:]]

        return jax.make_array_from_callback((shards * size, *rows.shape[1:]), sharding, part)

    return jax.tree.map(place, batch)


def _copies(sharding: NamedSharding) -> int:
    """How many devices hold parts of the same rows."""
    axes = sharding.spec[0] or ()
    split = (axes,) if isinstance(axes, str) else axes
    return math.prod(size for axis, size in sharding.mesh.shape.items() if axis not in split)
