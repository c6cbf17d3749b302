"""Finding and restoring the newest good checkpoint."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from etils import epath

from maxlite.checkpoint import layout, orbax_io, storage
from maxlite.checkpoint.errors import RestoreError
from maxlite.checkpoint.faults import patiently, why
from maxlite.checkpoint.tree import array_infos, differences, named_leaves
from maxlite.config import InputError


class Restored(NamedTuple):
    """A state read from storage, and the newer steps that could not be read."""

    state: Any
    metadata: layout.StepMetadata
    damaged: tuple[int, ...]


def restore_newest(
    directory: str | PathLike[str],
    abstract_state: Any,
    report: Callable[[str], None] = print,
    *,
    partial: bool = False,
) -> Restored | None:
    """Restores the newest good step of `directory`, each array to its sharding; None if it holds no committed step.

    Changes nothing on storage. With `partial`, only the arrays that `abstract_state` names are read, for example
    the parameters alone: `restore_newest(directory, {"params": abstract_params}, partial=True)`.

    A damaged step is reported and left as it is, and the next older one is tried. Raises InputError if a
    readable step has another structure than `abstract_state` or a newer maxlite wrote it, RestoreError if there
    are committed steps and all are damaged, or if storage or memory fails in another way, several times: then
    the newest step may be good, and an older one would not be the newest good one.
    """
    directory = storage.absolute(directory)
    committed, torn = patiently(f"checkpoint directory {directory}", lambda: layout.steps(directory), report)
    if torn:
        report(f"ignoring {_list(torn)} in {directory}: no commit marker")
    damaged: dict[int, str] = {}  # step: why
    for step in committed:
        path = layout.step_path(directory, step)
        read = functools.partial(_read_step, path, step, abstract_state, partial)
        try:
            state, metadata = patiently(f"checkpoint {path}", read, report)
        except (InputError, RestoreError):
            raise
        except Exception as error:  # damage, of all kinds; each one is reported
            damaged[step] = why(error)
            report(f"checkpoint {path} cannot be read and is skipped: {damaged[step]}")
        else:
            if damaged:
                report(f"falling back to step {step}: {max(damaged) - step} steps are lost to the damage")
            return Restored(state, metadata, tuple(damaged))
        gc.collect()  # or what was read of the damaged step stays in memory while an older one is read
    if damaged:
        raise RestoreError(
            f"none of the {len(damaged)} checkpoints in {directory} can be read ({_list(list(damaged))}); "
            f"nothing was changed. Newest: {damaged[committed[0]]}"
        )
    return None


def _list(steps: list[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


def _read_step(path: epath.Path, step: int, abstract: Any, partial: bool) -> tuple[Any, layout.StepMetadata]:
    metadata = layout.read_metadata(path)
    if metadata.step != step:
        raise ValueError(f"it is a copy of step {metadata.step} under another name")
    _require_same_structure(path, metadata, abstract, partial)
    return _read(path, abstract), metadata


def _require_same_structure(path: epath.Path, metadata: layout.StepMetadata, abstract: Any, partial: bool) -> None:
    wanted = array_infos(named_leaves(abstract))
    saved = {name: info for name, info in metadata.arrays.items() if name in wanted or not partial}
    if problems := differences(saved, wanted):
        raise InputError(
            f"checkpoint {path} does not fit this run's model and optimizer:",
            *(f"  {problem}" for problem in problems),
            "use the config that made it, or another run_name for another model",
        )


def _read(path: epath.Path, abstract_state: Any) -> Any:
    """Reads the state, its arrays owned by XLA so that a train step may donate them."""
    wanted = {name: _with_sharding(leaf) for name, leaf in named_leaves(abstract_state).items()}
    arrays = orbax_io.read_arrays(path, wanted)
    problems = differences(array_infos(arrays), array_infos(wanted))
    if problems:  # Orbax casts, pads and truncates in silence when asked to
        raise ValueError(f"arrays differ from their metadata: {'; '.join(problems)}")
    # What was read may alias host memory, and then cannot be donated: the first step would need twice the
    # memory. One array at a time, so that the copy needs room for the largest array only.
    owned = [jax.jit(jnp.copy, out_shardings=leaf.sharding)(arrays.pop(name)) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), owned)


def _with_sharding(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if leaf.sharding is not None:
        return leaf
    one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one_device)
