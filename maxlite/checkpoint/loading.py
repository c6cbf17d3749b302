"""Arrays of a checkpoint by name, for a notebook or a script."""

from __future__ import annotations

import difflib
import os
from os import PathLike

import jax
from etils import epath

from maxlite.checkpoint import layout, storage
from maxlite.checkpoint.errors import RestoreError
from maxlite.checkpoint.faults import why
from maxlite.checkpoint.reading import restore_newest
from maxlite.checkpoint.tree import named_leaves, nested
from maxlite.config import InputError


def load_arrays(
    path: str | PathLike[str],
    prefix: str = "",
    *,
    step: int | None = None,
    sharding: jax.sharding.Sharding | None = None,
) -> dict[str, jax.Array]:
    """Reads one array, the arrays under a name, or all of a checkpoint; each is known to be what was saved.

        from maxlite.checkpoint import load_arrays

        params = load_arrays("runs/quickstart", "params")
        kernel = load_arrays("runs/quickstart", "params/layers/mlp/up/kernel", step=250)

    Args:
        path: a run directory, its checkpoints, or one step.
        prefix: the name of one array, or of what is above arrays; `python -m maxlite.checkpoint show` lists them.
        step: which step; None: the newest good one, with a line for every newer one that is damaged.
        sharding: of every array; None: on the first device.

    Returns:
        The arrays by their whole names, in the shapes and dtypes in which they were saved, in the order of the tree.

    Raises:
        InputError: there is no such checkpoint, or nothing under that name (the nearest names are given).
        RestoreError: what is there is damaged, or cannot be read now.
    """
    directory, only = layout.locate(storage.absolute(path))
    if only is not None and step not in (None, only):
        raise InputError(f"{os.fspath(path)} is step {only}, and step={step} is asked for")
    wanted = only if step is None else step
    metadata = _newest_metadata(directory, wanted, os.fspath(path))
    above = prefix.strip("/")
    abstract = {
        name: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding)
        for name, info in metadata.arrays.items()
        if not above or name == above or name.startswith(f"{above}/")
    }
    if not abstract:
        raise _no_such_name(above, metadata)
    source = directory if wanted is None else layout.step_path(directory, wanted)
    restored = restore_newest(source, nested(abstract), partial=True)
    if restored is None:
        raise RestoreError(f"{source} was deleted while it was being read")
    arrays = named_leaves(restored.state)
    return {name: arrays[name] for name in abstract}


def _newest_metadata(directory: epath.Path, only: int | None, path: str) -> layout.StepMetadata:
    """Of the step that is wanted, or the newest whose metadata can be read."""
    committed = layout.steps(directory)[0]
    if only is not None and only not in committed:
        raise InputError(f"{path}: no committed step {only}; steps there: {', '.join(map(str, committed)) or 'none'}")
    if not committed:
        raise InputError(f"{path}: no checkpoint there; name a run directory, its checkpoints/, or one step")
    problems = []
    for step in committed if only is None else [only]:
        try:
            return layout.read_metadata(layout.step_path(directory, step))
        except (OSError, ValueError) as error:  # restore_newest says so too, when it goes on to an older step
            problems.append(f"step {step}: {why(error)}")
    raise RestoreError(f"no checkpoint in {directory} can be read; " + "; ".join(problems[:3]))


def _no_such_name(prefix: str, metadata: layout.StepMetadata) -> InputError:
    known = dict.fromkeys(
        "/".join(parts[:depth])
        for parts in (name.split("/") for name in metadata.arrays)
        for depth in range(1, len(parts) + 1)
    )
    near = difflib.get_close_matches(prefix, known, n=3) or list(known)[:3]
    return InputError(f"step {metadata.step} has no array {prefix!r} and none under it; nearest: {', '.join(near)}")
