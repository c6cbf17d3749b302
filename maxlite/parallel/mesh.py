"""The device mesh: how many devices share what."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from maxlite.config import InputError, ParallelConfig

# Outermost first: neighbouring devices differ in the last axis, whose collectives are the most frequent.
MESH_AXES = ("data", "fsdp", "tensor")


def mesh_keys(config: ParallelConfig) -> dict[str, int]:
    """Config key -> size, in the order of `MESH_AXES`; -1 where the devices that are left go."""
    return {f"ici_{axis}_parallelism": getattr(config, f"ici_{axis}_parallelism") for axis in MESH_AXES}


def make_mesh(config: ParallelConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh with axes `data`, `fsdp`, `tensor` over all devices (`devices`, or every process's).

    Raises:
        InputError: the sizes do not multiply to the number of devices; shows the arithmetic and sizes that fit.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_keys(config)
    known = math.prod(size for size in sizes.values() if size != -1)
    filled = [len(devices) // known if size == -1 else size for size in sizes.values()]
    if math.prod(filled) != len(devices):
        shown = " x ".join(f"{name}={size}" for name, size in sizes.items())
        total = f"a multiple of {known}" if -1 in sizes.values() else str(known)
        fit = " ".join(f"{name}={size}" for name, size in _nearest_plan(sizes, len(devices)).items())
        raise InputError(f"{shown} needs {total} devices, but there are {len(devices)}; this would fit: {fit}")
    # Auto, not Explicit: the model names shardings only where the compiler needs telling.
    return jax.make_mesh(filled, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices)


def describe_mesh(mesh: Mesh) -> str:
    """One line such as `8 cpu devices: data 1 x fsdp 8 x tensor 1`."""
    device = mesh.devices.flat[0]
    plural = "s" if mesh.size > 1 else ""
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    return f"{mesh.size} {device.device_kind} device{plural}: {axes}"


def _nearest_plan(sizes: dict[str, int], num_devices: int) -> dict[str, int]:
    """Sizes that multiply to `num_devices`: tensor and data kept as far as they divide it, the rest to fsdp."""
    left = num_devices
    plan = {}
    for axis in ("tensor", "data"):
        name = f"ici_{axis}_parallelism"
        plan[name] = math.gcd(sizes[name], left) if sizes[name] != -1 else 1
        left //= plan[name]
    plan["ici_fsdp_parallelism"] = left
    return {name: plan[name] for name in sizes}
