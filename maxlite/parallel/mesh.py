"""The device mesh: how many devices share what, inside a slice (ICI) and across slices (DCN)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from maxlite.config import InputError, ParallelConfig

# Outermost first: neighbouring devices differ in the last axis, whose collectives are the most frequent.
MESH_AXES = ("data", "fsdp", "context", "tensor")

Sizes = dict[str, int]  # mesh axis -> size, in the order of MESH_AXES
Devices = Sequence[Any]  # `jax.Device`s, or those of a topology description


@dataclass(frozen=True)
class MeshPlan:
    """How the axes lie on slices.

    slices: the devices of each slice, every slice with as many.
    ici, dcn: what each axis spans inside a slice, and how many slices; its size is the product.
    """

    slices: tuple[tuple[Any, ...], ...]
    ici: Sizes
    dcn: Sizes

    def mesh(self) -> Mesh:
        """The mesh; along an axis, the devices of one slice are neighbours."""
        ici, dcn = tuple(self.ici.values()), tuple(self.dcn.values())
        devices = [device for part in self.slices for device in part]
        if len(_hardware_slices(devices)) > 1:
            grid = mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, allow_split_physical_axes=True)
        elif len(self.slices) == 1:
            grid = mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
        else:
            # Slices in name only: no hardware has a say in the order.
            count = len(MESH_AXES)
            pairs = [axis for each in range(count) for axis in (each, count + each)]
            sizes = [outer * inner for outer, inner in zip(dcn, ici, strict=True)]
            grid = np.array(devices).reshape(*dcn, *ici).transpose(pairs).reshape(sizes)
        # Auto, not Explicit: the model names shardings only where the compiler needs telling.
        return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))

    def describe(self) -> str:
        """One line such as `8 cpu devices in 2 slices: data 2 (DCN) x fsdp 4 (ICI)`; axes of size 1 are left out."""
        size = sum(map(len, self.slices))
        axes = []
        for axis in MESH_AXES:
            ici, dcn = self.ici[axis], self.dcn[axis]
            if ici * dcn == 1:
                continue
            where = f" ({dcn} DCN x {ici} ICI)" if ici > 1 and dcn > 1 else " (DCN)" if dcn > 1 else " (ICI)"
            axes.append(f"{axis} {ici * dcn}" + (where if len(self.slices) > 1 else ""))
        plural = "s" if size > 1 else ""
        slices = f" in {len(self.slices)} slices" if len(self.slices) > 1 else ""
        return f"{size} {self.slices[0][0].device_kind} device{plural}{slices}" + (
            f": {' x '.join(axes)}" * bool(axes)
        )


def make_mesh(config: ParallelConfig, devices: Devices | None = None) -> Mesh:
    """The mesh of `plan_mesh`."""
    return plan_mesh(config, devices).mesh()


def plan_mesh(config: ParallelConfig, devices: Devices | None = None) -> MeshPlan:
    """Fits the sizes in the config to the devices (`devices`, or every process's).

    The slices are what the devices say (`slice_index`). Where they say nothing, as on CPUs and GPUs, or are all of
    one slice, dcn sizes that name several slices cut the devices, in the order of their processes, into as many equal
    parts: each of whole processes, or each a part of one.

    Raises:
        InputError: the sizes do not multiply to the devices of a slice and to the slices; shows the arithmetic and
            sizes that fit.
    """
    devices = jax.devices() if devices is None else devices
    ici, dcn = _sizes(config, "ici"), _sizes(config, "dcn")
    slices = _slices(devices, _known(dcn))
    filled_ici, filled_dcn = _fill(ici, len(slices[0])), _fill(dcn, len(slices))
    if filled_ici is None or filled_dcn is None:
        raise InputError(_mismatch(ici, dcn, len(devices), len(slices)))
    return MeshPlan(slices, filled_ici, filled_dcn)


def slice_of_devices(plan: MeshPlan) -> dict[Any, int]:
    """Device -> which slice it belongs to, from 0."""
    return {device: index for index, part in enumerate(plan.slices) for device in part}


def _sizes(config: ParallelConfig, kind: str) -> Sizes:
    return {axis: getattr(config, f"{kind}_{axis}_parallelism") for axis in MESH_AXES}


def _known(sizes: Mapping[str, int]) -> int:
    return math.prod(size for size in sizes.values() if size != -1)


def _fill(sizes: Sizes, available: int) -> Sizes | None:
    """The sizes with -1 replaced by what is left of `available`; None if they do not come out even."""
    left, rest = divmod(available, _known(sizes))
    if rest or (left > 1 and -1 not in sizes.values()):
        return None
    return {axis: left if size == -1 else size for axis, size in sizes.items()}


def _hardware_slices(devices: Devices) -> dict[int, list[Any]]:
    """slice_index -> its devices; those that carry none are of slice 0."""
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    return dict(sorted(slices.items()))


def _slices(devices: Devices, named: int) -> tuple[tuple[Any, ...], ...]:
    """The slices; `named`: how many the dcn sizes name.

    Raises:
        InputError: they have not all the same number of devices.
    """
    hardware = _hardware_slices(devices)
    if len(hardware) > 1:
        counts = {index: len(part) for index, part in hardware.items()}
        if len(set(counts.values())) > 1:
            shown = ", ".join(f"slice {index}: {count}" for index, count in counts.items())
            raise InputError(f"the slices have not all the same number of devices ({shown}); is one not whole?")
        return tuple(tuple(part) for part in hardware.values())
    # A TPU knows its slices: if all devices are of one, several were asked for in vain.
    if named == 1 or devices[0].platform == "tpu":
        return (tuple(devices),)
    processes = len({device.process_index for device in devices})
    if len(devices) % named or (processes % named and named % processes):
        shown = f"{len(devices)} devices" + (f" of {processes} processes" if processes > 1 else "")
        raise InputError(
            f"the dcn_ keys name {named} slices, into which {shown} do not split evenly; this would fit: "
            f"{_key_values('dcn', {'data': math.gcd(named, len(devices), processes)})} and every other dcn_ key 1"
        )
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    size = len(devices) // named
    return tuple(tuple(ordered[start : start + size]) for start in range(0, len(devices), size))


def _mismatch(ici: Sizes, dcn: Sizes, num_devices: int, num_slices: int) -> str:
    per_slice = num_devices // num_slices
    several = num_slices > 1
    have = f"{num_devices} devices" + (f" in {num_slices} slices of {per_slice}" if several else " in one slice")
    problems = []
    plan: list[str] = []
    for kind, sizes, available, what in (
        ("ici", ici, per_slice, "devices" + " in each slice" * several),
        ("dcn", dcn, num_slices, "slices"),
    ):
        if _fill(sizes, available) is None:
            total = ("a multiple of " if -1 in sizes.values() else "") + str(_known(sizes))
            given = {axis: size for axis, size in sizes.items() if size != 1} or {"data": 1}
            problems.append(f"{_key_values(kind, given, ' x ')} needs {total} {what}, not {available}")
            nearest = _nearest_plan(sizes, available, "fsdp" if kind == "ici" else "data")
            plan.append(_key_values(kind, {axis: size for axis, size in nearest.items() if size != sizes[axis]}))
    return f"there are {have}: {'; '.join(problems)}; this would fit: {' '.join(plan)}"


def _key_values(kind: str, sizes: Mapping[str, int], joint: str = " ") -> str:
    return joint.join(f"{kind}_{axis}_parallelism={size}" for axis, size in sizes.items())


def _nearest_plan(sizes: Sizes, available: int, filler: str) -> Sizes:
    """Sizes for `available`: each kept as far as it divides, innermost first; the rest to -1, or else to `filler`."""
    fill = next((axis for axis, size in sizes.items() if size == -1), filler)
    plan, left = dict(sizes), available
    for axis in (*(axis for axis in reversed(MESH_AXES) if axis != filler), filler):
        if axis != fill:
            plan[axis] = math.gcd(sizes[axis], left)
            left //= plan[axis]
    plan[fill] = sizes[fill] if sizes[fill] == -1 else left
    return plan
