"""From logical axis names to shardings.

The model names the dimensions of its parameters and activations by what they are (`embed`, `heads`, ...); the rules
here say over which mesh axes each is spread. Those of activations are prefixed `activation_`, as the same name may be
spread in one and whole in the other: FSDP spreads the `embed` of weights, never that of activations.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlite.config import InputError, ParallelConfig
from maxlite.parallel.mesh import MESH_AXES

Axes = tuple[str | None, ...]
Rules = Mapping[str, tuple[str, ...]]
Gradient = Callable[[Any, Any], Any]

# Logical axis -> the mesh axes it is spread over; (): whole. MaxText's names and defaults.
DEFAULT_RULES: Rules = {
    "vocab": ("tensor",),
    # Devices that share sequences hold different weights too: they gather them as those of fsdp do.
    "embed": ("fsdp", "context"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "layers": (),
    "norm": (),
    "activation_batch": ("data", "fsdp"),
    "activation_length": ("context",),
    "activation_embed": (),
    "activation_heads": ("tensor",),
    "activation_kv_heads": ("tensor",),
    "activation_mlp": ("tensor",),
    "activation_vocab": ("tensor",),
    # Of the embedding's look-up: tokens as the table needs them, rows as the table has them.
    "activation_lookup_batch": ("data",),
    "activation_lookup_embed": ("fsdp", "context"),
    "activation_lookup_width": ("context",),
}

logger = logging.getLogger(__name__)


def logical_rules(config: ParallelConfig) -> Rules:
    """The default rules, with those of `logical_axis_rules` in their place.

    Raises:
        InputError: a rule is for a name that no array has, or that has one already, or names no mesh axis.
    """
    problems = []
    for name, times in Counter(name for name, _ in config.logical_axis_rules).items():
        if name not in DEFAULT_RULES:
            problems.append(f"logical axis {name!r} {_unknown(name, DEFAULT_RULES)}")
        if times > 1:
            problems.append(f"{times} rules for {name!r}; keep one")
    for name, axes in config.logical_axis_rules:
        problems += [
            f"{name!r}: mesh axis {axis!r} {_unknown(axis, MESH_AXES)}" for axis in axes if axis not in MESH_AXES
        ]
        problems += [f"{name!r}: mesh axis {axis!r} twice" for axis, times in Counter(axes).items() if times > 1]
    if problems:
        raise InputError(*(f"logical_axis_rules: {problem}" for problem in problems))
    return {**DEFAULT_RULES, **{name: tuple(axes) for name, axes in config.logical_axis_rules}}


def _unknown(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=2)
    return f"is unknown; did you mean {' or '.join(near)}?" if near else f"is unknown; known: {', '.join(known)}"


def param_shardings(mesh: Mesh, params: Any, axes: Any, rules: Rules = DEFAULT_RULES) -> Any:
    """A `NamedSharding` for each parameter, in the tree of the parameters.

    A dimension is spread over as many of its mesh axes, from the first, as divide it, and held whole along the others:
    that costs memory, not correctness, so it is logged and not refused.

    Args:
        mesh: from `make_mesh`.
        params: arrays or `jax.ShapeDtypeStruct`s.
        axes: their logical axis names as `PartitionSpec`s in the same tree, from `nnx.get_partition_spec`.
        rules: logical axis -> mesh axes.

    Raises:
        InputError: two dimensions of a parameter are to be spread over one mesh axis.
    """
    whole: set[str] = set()

    def sharding(param: Any, names: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, _spec(mesh, rules, param.shape, tuple(names), whole))

    shardings = jax.tree.map(sharding, params, axes)
    for line in sorted(whole):
        logger.warning("parameters: %s; devices along that axis hold the same", line)
    return shardings


def batch_sharding(mesh: Mesh, rules: Rules = DEFAULT_RULES) -> NamedSharding:
    """Of the arrays of a batch, [rows, length]."""
    return NamedSharding(
        mesh, PartitionSpec(*(rules[name] or None for name in ("activation_batch", "activation_length")))
    )


def batch_shards(mesh: Mesh, rules: Rules = DEFAULT_RULES) -> int:
    """Into how many parts the rows of a batch are split."""
    return _parts(mesh, rules["activation_batch"])


def length_shards(mesh: Mesh, rules: Rules = DEFAULT_RULES) -> int:
    """Into how many parts each sequence is split."""
    return _parts(mesh, rules["activation_length"])


def bytes_per_device(abstract: Any) -> int:
    """Bytes that each device holds of a tree of `jax.ShapeDtypeStruct`s with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract)
    )


def share(mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Callable[[tuple[int, ...], Axes], int]:
    """The function that tells how many elements of an activation, by its shape and logical axes, a device holds."""

    def elements(shape: tuple[int, ...], names: Axes) -> int:
        spec = _spec(mesh, rules, shape, _activations(names), set())
        return math.prod(NamedSharding(mesh, spec).shard_shape(shape))

    return elements


def constrain(mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Callable[[jax.Array, Axes], jax.Array]:
    """The function by which the model tells the compiler how an activation is spread.

    It takes an array and a logical name (without `activation_`, or None) for each of its dimensions and returns the
    array. A dimension is spread over as many of its mesh axes as divide it; those that do not are logged.
    """
    if mesh.size == 1:
        return lambda x, names: x
    logged: set[str] = set()

    def constrained(x: jax.Array, names: Axes) -> jax.Array:
        whole: set[str] = set()
        here, left = _in_context(mesh, rules)
        spec = _spec(here, left, x.shape, _activations(names), whole)
        for line in sorted(whole - logged):
            logger.warning("activations: %s; devices along that axis compute the same", line)
        logged.update(whole)
        return jax.lax.with_sharding_constraint(x, NamedSharding(here, spec))

    return constrained


def per_shard(
    mesh: Mesh, rules: Rules = DEFAULT_RULES
) -> Callable[[Callable[..., jax.Array], tuple[Axes, ...], Axes], Callable[..., jax.Array]]:
    """The function by which the model runs, on each device's share of its arguments, what the compiler cannot split.

    It takes the function, the logical axes of each argument and those of the result, and returns the function for
    whole arrays.

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
            here, left = _in_context(mesh, rules)
            in_specs = tuple(
                _spec(here, left, x.shape, _activations(names), whole) for x, names in zip(args, in_axes, strict=True)
            )
            if whole:
                needs = "which this attention needs; attention=dot_product without context parallelism does not"
                raise InputError(*(f"{line}, {needs}" for line in sorted(whole)))
            out_specs = PartitionSpec(*(left[name] or None if name else None for name in _activations(out_axes)))
            names = set(here.axis_names) - set(here.manual_axes)
            # The replication check cannot see into kernels.
            return jax.shard_map(
                function, mesh=here, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False
            )(*args)

        return call

    return mapped


def summed_once(mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Callable[[Gradient], Gradient]:
    """Wraps `(params, batch) -> tree of sums over the batch`, so that devices that hold the same weights sum once.

    Left alone, the compiler sums over all devices whatever the function sums, as often as it does: with micro-batches,
    once for each, across slices too. Here every group of devices that holds all weights between them does the whole
    function for its rows, and the results are summed at the end.
    """
    spread = {axis for name, axes in rules.items() if not name.startswith("activation_") for axis in axes}
    axes = tuple(axis for axis in rules["activation_batch"] if mesh.shape[axis] > 1 and axis not in spread)
    if not axes:
        return lambda function: function

    def wrap(function: Gradient) -> Gradient:
        def of_own_rows(params: Any, batch: Any) -> Any:
            return jax.tree.map(lambda x: jax.lax.psum(x, axes), function(params, batch))

        return jax.shard_map(
            of_own_rows,
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(axes)),
            out_specs=PartitionSpec(),
            axis_names=set(axes),
            check_vma=False,
        )

    return wrap


def _in_context(mesh: Mesh, rules: Rules) -> tuple[Any, Rules]:
    """Mesh and rules as they are where this is traced: inside `summed_once`, without the axes that it took."""
    here = jax.sharding.get_abstract_mesh()
    if not here.manual_axes:
        return mesh, rules
    taken = set(here.manual_axes)
    return here, {name: tuple(axis for axis in axes if axis not in taken) for name, axes in rules.items()}


def _activations(names: Axes) -> Axes:
    return tuple(name and f"activation_{name}" for name in names)


def _parts(mesh: Mesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _spec(mesh: Mesh, rules: Rules, shape: tuple[int, ...], names: Axes, whole: set[str]) -> PartitionSpec:
    """Mesh axes for each dimension. Adds to `whole` a line for each dimension that its axes do not divide."""
    if len(names) != len(shape):
        raise ValueError(f"{len(names)} logical axes {names} for an array of shape {shape}")
    entries: list[tuple[str, ...] | None] = []
    taken: dict[str, str] = {}
    for size, name in zip(shape, names, strict=True):
        if name is not None and name not in rules:
            raise ValueError(f"logical axis {name!r} has no rule; known: {', '.join(rules)}")
        wanted = rules[name] if name is not None else ()
        for axis in wanted:
            if axis in taken:
                raise InputError(
                    f"logical_axis_rules: {taken[axis]!r} and {name!r} are dimensions of one array and cannot both be "
                    f"spread over {axis!r}"
                )
            taken[axis] = str(name)
        axes = wanted
        while size % _parts(mesh, axes):
            axes = axes[:-1]
        if _parts(mesh, axes) < _parts(mesh, wanted):
            sizes = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in wanted)
            whole.add(f"{name} of {size} is not a multiple of {sizes}")
        entries.append(axes or None)
    return PartitionSpec(*entries)
