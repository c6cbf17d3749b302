"""TPU slices by the names that people write: `v5p-128`, `v6e-256`."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from maxlite.config import InputError


@dataclass(frozen=True)
class Generation:
    """The slices of one generation of TPUs that can be had.

    cores: what the number in a name counts, per chip: v4, v5p and tpu7x names count cores, the others chips.
    cube: whether chips form a 3-D torus, of 4x4x4 cubes from 64 chips on, rather than a 2-D one.
    max_chips: in the largest slice.
    longest: side of a slice, in chips.
    devices: as jax counts them, in one chip.
    """

    cores: int
    cube: bool
    max_chips: int
    longest: int
    devices: int = 1


# Sizes: https://cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x.
GENERATIONS = {
    "v4": Generation(cores=2, cube=True, max_chips=2048, longest=16),
    "v5e": Generation(cores=1, cube=False, max_chips=256, longest=16),
    "v5p": Generation(cores=2, cube=True, max_chips=6144, longest=256),
    "v6e": Generation(cores=1, cube=False, max_chips=256, longest=16),
    "tpu7x": Generation(cores=2, cube=True, max_chips=9216, longest=256, devices=2),
}
ALIASES = {"v5litepod": "v5e"}  # the cloud's name for it

_SMALL_3D = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_ALL_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))


@dataclass(frozen=True)
class Topology:
    """One slice: its name, such as `v5p-128`, the generation, such as `v5p`, and the chips along each side."""

    name: str
    generation: str
    bounds: tuple[int, ...]

    @property
    def chips(self) -> int:
        """In the slice."""
        return math.prod(self.bounds)

    @property
    def num_devices(self) -> int:
        """In the slice, as jax counts them."""
        return self.chips * GENERATIONS[self.generation].devices

    def doubled(self) -> Topology | None:
        """The slice of twice the chips; None: there is none."""
        number = 2 * self.chips * GENERATIONS[self.generation].cores
        bounds = _slices(GENERATIONS[self.generation]).get(number)
        return None if bounds is None else Topology(f"{self.generation}-{number}", self.generation, bounds)

    @property
    def shape(self) -> str:
        """Such as `4x4x4`."""
        return "x".join(map(str, self.bounds))

    def devices(self, num_slices: int) -> Sequence[Any]:
        """The devices of `num_slices` such slices, to compile for; none of them needs to exist.

        Raises:
            RuntimeError: from libtpu, if it does not know this topology.
        """
        from jax.experimental import topologies

        # On v4 a chip is two devices unless asked for as one, which is what runs there get.
        options: dict[str, Any] = {"chip_config_name": "megacore"} if self.generation == "v4" else {}
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{self.generation}:{self.shape}", num_slices=num_slices, **options
        )
        return description.devices


def parse_topology(name: str) -> Topology:
    """The slice that `name` means.

    Raises:
        InputError: there is none of that name; lists the nearest ones.
    """
    match = re.fullmatch(r"([a-z0-9]+)-(\d{1,9})", name.strip().lower())
    asked = ALIASES.get(match[1], match[1]) if match else name.strip().lower()
    size = int(match[2]) if match else 0
    if asked in GENERATIONS and (bounds := _slices(GENERATIONS[asked]).get(size)):
        return Topology(f"{asked}-{size}", asked, bounds)
    near = [asked] if asked in GENERATIONS else difflib.get_close_matches(asked, GENERATIONS, n=2, cutoff=0.4)
    names = [f"{generation}-{n}" for generation in near or GENERATIONS for n in _nearest_sizes(generation, size)]
    counted = {generation: "cores" if GENERATIONS[generation].cores > 1 else "chips" for generation in near}
    units = "; ".join(f"{generation} names count {unit}" for generation, unit in counted.items())
    raise InputError(
        f"compile_topology={name}: no such TPU slice; the nearest are {', '.join(names)}" + (units and f" ({units})")
    )


def _slices(generation: Generation) -> dict[int, tuple[int, ...]]:
    """Number in the name -> chips along each side, of every slice of a generation."""
    if not generation.cube:
        return {math.prod(bounds) * generation.cores: bounds for bounds in _ALL_2D}
    slices: dict[int, tuple[int, ...]] = {math.prod(bounds) * generation.cores: bounds for bounds in _SMALL_3D}
    sides = range(4, generation.longest + 1, 4)
    limit = generation.max_chips
    shapes = [
        (a, b, c)
        for a, b in itertools.combinations_with_replacement(sides, 2)
        if a * b * b <= limit
        for c in range(b, min(generation.longest, limit // (a * b)) + 1, 4)
    ]
    # Of the shapes of one size, the one whose sides are the most alike, as the cloud gives.
    for bounds in sorted(shapes, key=sum, reverse=True):
        slices[math.prod(bounds) * generation.cores] = bounds
    return slices


def _nearest_sizes(generation: str, size: int, count: int = 3) -> list[int]:
    sizes = _slices(GENERATIONS[generation])
    return sorted(sorted(sizes, key=lambda n: abs(math.log(n / max(size, 1))))[:count])
