"""From logical axis names to shardings.

The model names the dimensions of its parameters and activations by what they are (`embed`, `heads`, ...); the rules
here say over which mesh axes each is spread. Parameters and activations have separate rules, as the same name may
be spread in one and whole in the other: FSDP spreads the `embed` of weights, never that of activations.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlite.config import InputError

Axes = tuple[str | None, ...]
Rules = Mapping[str, tuple[str, ...]]

# Logical axis -> the mesh axes it is spread over; (): whole.
PARAM_RULES: Rules = {
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "layers": (),
    "norm": (),
}
ACTIVATION_RULES: Rules = {
    "batch": ("data", "fsdp"),
    "length": (),
    "embed": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}

logger = logging.getLogger(__name__)


def param_shardings(mesh: Mesh, params: Any, axes: Any, rules: Rules = PARAM_RULES) -> Any:
    """A `NamedSharding` for each parameter, in the tree of the parameters.

    A dimension that its mesh axes do not divide is held whole by each of their devices: it costs memory, not
    correctness, so it is logged and not refused.

    Args:
        mesh: from `make_mesh`.
        params: arrays or `jax.ShapeDtypeStruct`s.
        axes: their logical axis names as `PartitionSpec`s in the same tree, from `nnx.get_partition_spec`.
        rules: logical axis -> mesh axes.
    """
    whole: set[str] = set()

    def sharding(param: Any, names: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, _spec(mesh, rules, param.shape, tuple(names), whole))

    shardings = jax.tree.map(sharding, params, axes)
    for line in sorted(whole):
        logger.warning("parameters: %s; each of these devices holds all of it", line)
    return shardings


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over `data` and `fsdp`; the other dimensions whole."""
    return NamedSharding(mesh, PartitionSpec(ACTIVATION_RULES["batch"]))


def batch_shards(mesh: Mesh) -> int:
    """Into how many parts the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in ACTIVATION_RULES["batch"])


def constrain(mesh: Mesh, rules: Rules = ACTIVATION_RULES) -> Callable[[jax.Array, Axes], jax.Array]:
    """The function by which the model tells the compiler how an activation is spread.

    It takes an array and a logical name (or None) for each of its dimensions and returns the array. A dimension
    that its mesh axes do not divide is computed whole on each of their devices; that is logged.
    """
    if mesh.size == 1:
        return lambda x, names: x
    logged: set[str] = set()

    def constrained(x: jax.Array, names: Axes) -> jax.Array:
        whole: set[str] = set()
        spec = _spec(mesh, rules, x.shape, names, whole)
        for line in sorted(whole - logged):
            logger.warning("activations: %s; each of these devices computes all of it", line)
        logged.update(whole)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return constrained


def per_shard(
    mesh: Mesh, rules: Rules = ACTIVATION_RULES
) -> Callable[[Callable[..., jax.Array], tuple[Axes, ...], Axes], Callable[..., jax.Array]]:
    """The function by which the model runs a hand-written kernel on each device's share of its arguments.

    It takes the kernel, the logical axes of each argument and those of the result, and returns the kernel for whole
    arrays.

    Raises:
        InputError: (when the result is called) a dimension is not a multiple of its mesh axes. Held whole instead,
            the shares of two arguments would no longer belong together.
    """
    if mesh.size == 1:
        return lambda function, in_axes, out_axes: function

    def mapped(
        function: Callable[..., jax.Array], in_axes: tuple[Axes, ...], out_axes: Axes
    ) -> Callable[..., jax.Array]:
        def call(*args: jax.Array) -> jax.Array:
            whole: set[str] = set()
            in_specs = tuple(_spec(mesh, rules, x.shape, names, whole) for x, names in zip(args, in_axes, strict=True))
            if whole:
                raise InputError(
                    *(f"{line}, which this kernel needs; attention=dot_product does not" for line in whole)
                )
            out_specs = PartitionSpec(*(rules[name] or None if name else None for name in out_axes))
            # The replication check cannot see into kernels.
            return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*args)

        return call

    return mapped


def _spec(mesh: Mesh, rules: Rules, shape: tuple[int, ...], names: Axes, whole: set[str]) -> PartitionSpec:
    """Mesh axes for each dimension. Adds to `whole` a line for each dimension that they do not divide."""
    if len(names) != len(shape):
        raise ValueError(f"{len(names)} logical axes {names} for an array of shape {shape}")
    entries: list[tuple[str, ...] | None] = []
    for size, name in zip(shape, names, strict=True):
        if name is not None and name not in rules:
            raise ValueError(f"logical axis {name!r} has no rule; known: {', '.join(rules)}")
        mesh_axes = rules[name] if name is not None else ()
        if size % math.prod(mesh.shape[axis] for axis in mesh_axes):
            keys = " x ".join(f"ici_{axis}_parallelism={mesh.shape[axis]}" for axis in mesh_axes)
            whole.add(f"{name} of {size} is not a multiple of {keys}")
            mesh_axes = ()
        entries.append(mesh_axes or None)
    return PartitionSpec(*entries)
