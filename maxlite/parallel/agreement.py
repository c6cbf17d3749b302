"""How processes take the same decisions: their flags ride on the steps that they compute together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class Agreement:
    """Named flags of every process, true for all where they are true for one.

    A step that all processes compute takes each one's flags as an input (`to_device`) and returns, with its other
    results, whether any process had them set (`reduce`). So every process reads the same values at the same step, and
    that costs no message of its own.

    names: of the flags; at most a handful, since each combination is kept on the devices.
    sharding: of the input, bool `[devices, names]`, a row per device of the mesh.
    abstract: the input's shape, dtype and sharding.
    """

    def __init__(self, mesh: Mesh, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self.sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self.abstract = jax.ShapeDtypeStruct((mesh.size, len(self.names)), bool, sharding=self.sharding)
        self._local = len(self.sharding.addressable_devices)
        self._alone = self._local == mesh.size
        self._sent: dict[tuple[bool, ...], jax.Array] = {}

    def to_device(self, own: Mapping[str, bool]) -> jax.Array:
        """This process's flags as its rows of the global input; those it does not name are false."""
        if unknown := own.keys() - set(self.names):
            raise ValueError(f"{', '.join(sorted(unknown))}: not among the flags {', '.join(self.names)}")
        values = tuple(own.get(name, False) for name in self.names)
        if values not in self._sent:
            rows = np.broadcast_to(np.array(values, bool), (self._local, len(values)))
            self._sent[values] = jax.make_array_from_process_local_data(self.sharding, rows, self.abstract.shape)
        return self._sent[values]

    def reduce(self, flags: jax.Array) -> dict[str, jax.Array]:
        """Bool scalars, the same on every device, by name: whether any process set it. To be traced inside a step."""
        # One reduction over the devices for all flags, whatever the compiler makes of taking them apart.
        any_set = jax.lax.with_sharding_constraint(jnp.any(flags, axis=0), self._replicated)
        return {name: any_set[i] for i, name in enumerate(self.names)}

    def agreed(self, own: Mapping[str, bool], reduced: Mapping[str, Any] | None) -> dict[str, bool]:
        """The flags to act on.

        Args:
            own: this process's flags now. A process that is alone acts on them at once.
            reduced: what `reduce` gave in the newest finished step, whatever else is in it; None: there is none yet.
        """
        values: Mapping[str, Any] = own if self._alone else reduced or {}
        return {name: bool(values.get(name, False)) for name in self.names}
