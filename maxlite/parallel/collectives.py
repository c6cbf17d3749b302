"""What a compiled step sends between devices: kind, mesh axis, count, bytes, and over which network."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from maxlite.parallel.hlo import Executed, HloProgram, array_bytes

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


class Collective(NamedTuple):
    """All exchanges of one kind in one step.

    kind: `all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all`, `collective-permute`.
    axis: the mesh axes whose devices take part, such as `fsdp` or `data,fsdp`.
    devices: that exchange with one another.
    network: `ICI` inside a slice, `DCN` between slices.
    scalar: whether the exchange is of at most `SCALAR_BYTES` on each device: losses, norms, flags.
    count: times in a step, that of a loop's body times its rounds.
    bytes: per device and step: the larger of what goes in and what comes out.
    """

    kind: str
    axis: str
    devices: int
    network: str
    scalar: bool
    count: int
    bytes: int


# A scalar rides in a padded tile of 8 x 128 numbers, or a few of them together.
SCALAR_BYTES = 64 * 1024


def read_collectives(program: HloProgram, mesh: Mesh, slice_of: Mapping[Any, int]) -> list[Collective]:
    """The exchanges of one run of `program`, the largest first.

    Three forms of TPU programs are named by what they do: an all-reduce of which each device keeps its part is a
    reduce-scatter, an all-reduce of zeros into which each device has written its part is an all-gather, and a send
    that is answered through the host is the exchange between slices that it says it is.

    Args:
        program: compiled for the devices of `mesh`.
        mesh: the mesh.
        slice_of: device -> slice (`slice_of_devices`).
    """
    reader = _Groups(program, mesh, slice_of)
    totals: dict[tuple[str, str, int, str, bool], list[int]] = defaultdict(lambda: [0, 0])
    seen: set[tuple[str, str, str]] = set()
    for done in program.executed:
        found = _kind_and_bytes(program, done)
        if found is None:
            continue
        kind, size = found
        # An exchange that runs beside other work is cut into parts, fused with that work; all have its channel. Sends
        # to other slices have channels of their own.
        channel = re.search(r"channel_id=(\d+)", done.instruction.attributes)
        key = (done.scope, done.instruction.opcode, channel[1] if channel else done.instruction.name)
        if key in seen:
            continue
        seen.add(key)
        total = totals[kind, *reader.axis_devices_network(done), size <= SCALAR_BYTES]
        total[0] += done.times
        total[1] += done.times * size
    listed = [Collective(*key, count, size) for key, (count, size) in totals.items()]
    return sorted(listed, key=lambda c: (c.network, c.bytes), reverse=True)


def _kind_and_bytes(program: HloProgram, done: Executed) -> tuple[str, int] | None:
    """Of an exchange; None for any other instruction."""
    instruction = done.instruction
    if instruction.opcode == "send":
        transfer = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
        if transfer is None:
            return None
        operand = done.computation.instructions[instruction.operands[0]]
        kind = transfer[1].lower().replace("_", "-")
        return ("collective-permute" if kind == "one-to-one" else kind), array_bytes(operand.shape)
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    operands = [done.computation.instructions[name] for name in instruction.operands]
    sent = sum(array_bytes(operand.shape) for operand in operands)
    size = max(sent, array_bytes(instruction.shape) if kind == instruction.opcode else sent)
    if kind == "all-gather" and kind != instruction.opcode:
        size = array_bytes(instruction.shape) - sent  # the start's result holds what went in, too
    if kind == "all-reduce":
        if done.computation.name.startswith("all-reduce-scatter"):
            return "reduce-scatter", size
        if all(_writes_part(program, done, operand.name) for operand in operands):
            return "all-gather", size
    return kind, size


def _writes_part(program: HloProgram, done: Executed, name: str) -> bool:
    """Whether an operand is a part written into a larger array."""
    operand = done.computation.instructions[name]
    if operand.opcode == "fusion":
        root = program.computations[operand.attribute("calls")].root
        names = {i.opcode for i in program.computations[operand.attribute("calls")].instructions.values()}
        return root is not None and "dynamic-update-slice" in names
    return operand.opcode == "dynamic-update-slice"


class _Groups:
    """Which devices exchange, by the numbers that the program gives them."""

    def __init__(self, program: HloProgram, mesh: Mesh, slice_of: Mapping[Any, int]) -> None:
        self._axes = mesh.axis_names
        devices = list(mesh.devices.flat)
        coordinates = np.stack(np.unravel_index(np.arange(mesh.size), mesh.devices.shape), axis=1)
        slices = np.array([slice_of[device] for device in devices])
        # With several slices of real hardware, each runs a program of its own, whose devices count from 0.
        self._by_slice = [coordinates[slices == index] for index in sorted(set(slices))]
        self._coordinates, self._slices = coordinates, slices
        self._whole = program.partitions == len(devices)

    def axis_devices_network(self, done: Executed) -> tuple[str, int, str]:
        """Of one exchange."""
        attributes = done.instruction.attributes
        if target := re.search(r'_xla_megascale_target="([^"]*)"', attributes):
            group = _megascale_slices(target[1], len(self._by_slice))
            return self._axis(np.stack([self._by_slice[index][0] for index in group])), len(group), "DCN"
        group = _first_group(attributes)
        places = self._coordinates if self._whole else self._by_slice[0]
        group = group or list(range(len(places)))  # none named: all of the program
        across = self._whole and len(set(self._slices[group])) > 1
        return self._axis(places[group]), len(group), "DCN" if across else "ICI"

    def _axis(self, coordinates: np.ndarray) -> str:
        varies = (coordinates != coordinates[0]).any(axis=0)
        return ",".join(axis for axis, used in zip(self._axes, varies, strict=True) if used)


def _first_group(attributes: str) -> list[int]:
    """The first group of `replica_groups` (or the first pair of a permutation); [] where all take part."""
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", attributes):
        return [int(n) for n in listed[1].split(",")]
    if "replica_groups=mesh" in attributes:
        return _group_of_mesh(attributes)
    # Such as [2,4]<=[4,2]T(1,0): the numbers from 0, shaped, transposed, and cut into groups.
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota is None:
        return []
    groups, shape = _numbers(iota[1]), _numbers(iota[2])
    order: Sequence[int] = _numbers(iota[3]) if iota[3] else range(len(shape))
    return [int(n) for n in np.arange(np.prod(shape)).reshape(shape).transpose(order).reshape(groups)[0]]


def _group_of_mesh(attributes: str) -> list[int]:
    """The first group of such as `mesh['a'=4,'b'=8], device_ids=([8,4]T(1,0)) {'a','b':(2)4}`.

    Devices that differ in a, and in the part of b that is left when it is cut into 2 x 4.
    """
    ids = r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    match = re.search(rf"replica_groups=mesh\[([^]]*)\]{ids} ?\{{([^}}]*)\}}", attributes)
    if match is None:
        raise ValueError(f"cannot read which devices exchange: {attributes[:200]}")
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
    devices = np.arange(np.prod(list(sizes.values())))
    if match[2]:
        devices = devices.reshape(_numbers(match[2]))
    if match[3]:
        devices = devices.transpose(_numbers(match[3]))
    places = {name: [0] for name in sizes}  # along each axis, those of the group
    for name, before, part in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", match[4]):
        count = int(part or sizes[name])
        step = sizes[name] // (int(before or 1) * count)
        places[name] = [place + step * index for place in places[name] for index in range(count)]
    return devices.reshape(list(sizes.values()))[np.ix_(*places.values())].flatten().tolist()


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _megascale_slices(target: str, count: int) -> list[int]:
    """The slices, from 0, that exchange: `{1,2}x{0:3}` is slices 1 and 2, counted from 1, devices 0 to 3 of each."""
    match = re.match(r"\{([\d,:]+)\}", target)
    if match is None:
        return list(range(count))
    slices: list[int] = []
    for part in match[1].split(","):
        low, _, high = part.partition(":")
        slices += range(int(low), int(high or low) + 1)
    return [index - 1 for index in slices]
