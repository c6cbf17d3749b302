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
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Rules = Mapping[str, tuple[str, ...]]

# Axes that are not named here are held whole.
PARAM_RULES: Rules = {
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
}
ACTIVATION_RULES: Rules = {
    "batch": ("data", "fsdp"),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
}

logger = logging.getLogger(__name__)


def logical_axes(params: Any) -> Any:
    """The tree of the parameters with a `PartitionSpec` of logical axis names in place of each array.

    Read from the `out_sharding` metadata of the nnx variables.
    """

    def names(variable: nnx.Variable) -> nnx.Variable:
        return variable.replace(PartitionSpec(*(variable.get_metadata("out_sharding", None) or ())))

    return jax.tree.map(names, params, is_leaf=lambda x: isinstance(x, nnx.Variable))


def param_shardings(mesh: Mesh, params: Any, axes: Any, rules: Rules = PARAM_RULES) -> Any:
    """A `NamedSharding` for each parameter, in the tree of the parameters.

    A dimension that its mesh axes do not divide is held whole by each of their devices: it costs memory, not
    correctness, so it is logged and not refused.

    Args:
        mesh: from `make_mesh`.
        params: arrays or `jax.ShapeDtypeStruct`s.
        axes: from `logical_axes`.
        rules: logical axis -> mesh axes.
    """
    whole: set[str] = set()

    def sharding(param: Any, names: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, _spec(mesh, rules, param.shape, names, whole))

    shardings = jax.tree.map(sharding, params, axes)
    for line in sorted(whole):
        logger.warning("%s", line)
    return shardings


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over `data` and `fsdp`; the other dimensions whole."""
    return NamedSharding(mesh, PartitionSpec(ACTIVATION_RULES["batch"]))


def batch_shards(mesh: Mesh) -> int:
    """Into how many parts the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in ACTIVATION_RULES["batch"])


def replicated(mesh: Mesh) -> NamedSharding:
    """Held whole by every device."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(mesh: Mesh, rules: Rules = ACTIVATION_RULES) -> Callable[[jax.Array, tuple[str | None, ...]], jax.Array]:
    """The function by which the model tells the compiler how an activation is spread.

    It takes an array and a logical name (or None) for each of its dimensions and returns the array. A dimension
    that its mesh axes do not divide is left whole.
    """
    if mesh.size == 1:
        return lambda x, names: x

    def constrained(x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
        spec = _spec(mesh, rules, x.shape, names, set())
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return constrained


def _spec(
    mesh: Mesh, rules: Rules, shape: tuple[int, ...], names: tuple[str | None, ...] | PartitionSpec, whole: set[str]
) -> PartitionSpec:
    """Mesh axes for each dimension. Adds to `whole` a line for each dimension that could not be divided."""
    if names and len(names) != len(shape):
        raise ValueError(f"{len(names)} axis names {tuple(names)} for an array of shape {shape}")
    entries: list[tuple[str, ...] | None] = []
    for size, name in zip(shape, names, strict=False):
        mesh_axes = rules.get(name, ()) if name else ()
        devices = math.prod(mesh.shape[axis] for axis in mesh_axes)
        if size % devices:
            keys = " x ".join(f"ici_{axis}_parallelism={mesh.shape[axis]}" for axis in mesh_axes)
            whole.add(f"{name}={size} is not a multiple of {keys}: each of those devices holds all of it")
            mesh_axes = ()
        entries.append(mesh_axes or None)
    return PartitionSpec(*entries)
