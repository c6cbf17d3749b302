"""Reads the arrays of a step and proves that they are what was saved, while the next ones are being read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from maxlite.checkpoint import fingerprint, integrity, layout, orbax_io
from maxlite.checkpoint.background import Job
from maxlite.checkpoint.errors import Damage
from maxlite.checkpoint.tree import array_infos, differences, named_leaves
from maxlite.config import CheckpointConfig, InputError

Arrays = dict[str, jax.Array]
Agree = Callable[[Callable[[], Any]], Any]

# Arrays are read in groups of about this size: large enough that storage is kept busy, small enough that a group's
# copy and check hide behind the reading of the next, and that the memory for two groups does not matter.
GROUP_BYTES = 256 << 20


def read_state(
    path: epath.Path,
    metadata: layout.StepMetadata,
    abstract_state: Any,
    partial: bool,
    config: CheckpointConfig,
    agree: Agree,
) -> tuple[Any, list[str]]:
    """The state in the tree, shardings and dtypes of `abstract_state`; and which arrays changed dtype, in words.

    The arrays belong to XLA and may be donated. Raises InputError for another structure, all kinds of errors for
    damage.
    """
    wanted = named_leaves(abstract_state)
    arrays = dict(read_checked(path, metadata, wanted, partial, config, agree))
    casts = [
        f"{name}: {metadata.arrays[name]} -> {leaf.dtype}"
        for name, leaf in wanted.items()
        if metadata.arrays[name].dtype != str(leaf.dtype)
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[name] for name in wanted]), casts


def read_checked(
    path: epath.Path,
    metadata: layout.StepMetadata,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    partial: bool,
    config: CheckpointConfig,
    agree: Agree,
) -> Iterator[tuple[str, jax.Array]]:
    """Yields the wanted arrays with their names, each known to be what was saved (as far as `checkpoint_verify` says).

    Those wanted without a sharding are read to the first device. At any moment two groups of arrays are in memory
    besides those that the caller keeps. `agree(part)` runs a part that may fail on this process alone, and raises on
    every process if it did.
    """
    wanted = {name: _with_sharding(leaf) for name, leaf in wanted.items()}
    record = agree(lambda: _check_files(path, metadata, wanted, partial, config))
    state = path / layout.STATE
    groups = _groups(metadata, wanted)
    read = functools.partial(orbax_io.read_arrays, state, config=config)
    ahead = [Job("checkpoint-read", functools.partial(read, groups[0]))]
    try:
        for group, following in zip(groups, [*groups[1:], None], strict=True):
            arrays = agree(functools.partial(_take, ahead, read, group))
            if following is not None:
                ahead.append(Job("checkpoint-read", functools.partial(read, following)))
            done = {name: _finish(arrays.pop(name), wanted[name]) for name in group}
            if record is not None and config.checkpoint_verify == "full":
                found = {name: fingerprint.of_one(sums) for name, (_, sums) in done.items()}
                agree(functools.partial(integrity.require_arrays, record, found))
            for name in group:
                yield name, done.pop(name)[0]
    finally:
        for reading in ahead:
            reading.wait(config.checkpoint_timeout_seconds)


def _check_files(
    path: epath.Path,
    metadata: layout.StepMetadata,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    partial: bool,
    config: CheckpointConfig,
) -> integrity.Record | None:
    record = None
    if config.checkpoint_verify != "off":
        record = integrity.read(path)
        integrity.require_files(path, record)
    saved = {name: info for name, info in metadata.arrays.items() if name in wanted or not partial}
    if problems := differences(saved, array_infos(wanted), ignore_casts=True):
        raise InputError(
            f"checkpoint {path} does not fit this run's model and optimizer:",
            *(f"  {problem}" for problem in problems),
            "use the config that made it, or another run_name for another model; load_parameters_path takes the "
            "parameters of a checkpoint only",
        )
    return record


def _take(ahead: list[Job[Arrays]], read: Callable[..., Arrays], group: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
    """The arrays of a group, read ahead; or read now, when what was read ahead failed and this is another try."""
    if ahead:
        reading = ahead.pop()
        reading.join()
        arrays = reading.result()
    else:
        arrays = read(group)
    # Orbax casts, pads and truncates in silence when asked to.
    if problems := differences(array_infos(arrays), array_infos(group)):
        raise Damage(f"arrays differ from their metadata: {'; '.join(problems)}")
    return arrays


def _finish(array: jax.Array, wanted: jax.ShapeDtypeStruct) -> tuple[jax.Array, jax.Array]:
    """The array as it is wanted and owned by XLA, and its fingerprint as it was stored; one pass over memory.

    What was read may alias host memory and then cannot be donated: the first step would need twice the memory.
    """
    return _finisher(np.dtype(wanted.dtype), wanted.sharding)(array)


@functools.cache
def _finisher(dtype: np.dtype, sharding: jax.sharding.Sharding):  # noqa: ANN202 (a jitted function has no public type)
    def finish(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.array(x, dtype, copy=True), fingerprint.fingerprint(x)

    return jax.jit(finish, out_shardings=(sharding, fingerprint.replicated(sharding)))


def _groups(
    metadata: layout.StepMetadata, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """The arrays as they are stored, to the shardings that are wanted."""
    groups: list[dict[str, jax.ShapeDtypeStruct]] = [{}]
    size = 0
    for name, leaf in wanted.items():
        if size > GROUP_BYTES:
            groups.append({})
            size = 0
        stored = jax.ShapeDtypeStruct(leaf.shape, metadata.arrays[name].dtype, sharding=leaf.sharding)
        groups[-1][name] = stored
        size += stored.size * stored.dtype.itemsize
    return groups


def _with_sharding(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if leaf.sharding is not None:
        return leaf
    one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one_device)
