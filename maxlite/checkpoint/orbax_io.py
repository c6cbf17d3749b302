"""The only module that touches Orbax, so that its churn stays in one file.

Of Orbax this uses the array writer and reader and the atomic step directory. Which steps exist, which are
good and which are kept is decided on what is on storage, because Orbax's own step cache names steps that
failed and forgets steps that are intact.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from maxlite.checkpoint import layout
from maxlite.checkpoint.tree import ArrayInfo, array_infos, named_leaves, nested


class _ErrorsOnly(logging.Filter):
    """Drops what Orbax logs below an error: a dozen lines per save otherwise."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or "/orbax/" not in record.pathname


logging.getLogger("absl").addFilter(_ErrorsOnly())


def _handler() -> ocp.CompositeCheckpointHandler:
    # Uncompressed: zstd takes 8% off weights and doubles the time to commit.
    arrays = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False)
    return ocp.CompositeCheckpointHandler(state=arrays, metadata=ocp.JsonCheckpointHandler(layout.METADATA_FILE))


class Writer:
    """Writes one step at a time in the background."""

    def __init__(self, timeout_seconds: float) -> None:
        self._orbax = ocp.AsyncCheckpointer(_handler(), timeout_secs=math.ceil(timeout_seconds))

    def start(self, path: epath.Path, arrays: Mapping[str, jax.Array], metadata: dict[str, Any]) -> None:
        """Starts to write arrays (by name) and metadata to `path`; returns once the arrays may be donated.

        Raises whatever storage raises. On CPU the snapshot is the array itself, and XLA copies instead of
        donating while it is held.
        """
        state, extra = ocp.args.PyTreeSave(nested(arrays)), ocp.args.JsonSave(metadata)
        self._orbax.save(path, ocp.args.Composite(state=state, metadata=extra))

    def finish(self) -> None:
        """Blocks until Orbax says that the step is committed; raises what went wrong in the background."""
        self._orbax.wait_until_finished()

    def close(self) -> None:
        """Waits for the step being written and releases threads and files."""
        self._orbax.close()


def read_arrays(path: epath.Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads the named arrays of a committed step, each straight to the sharding that `abstract` gives it.

    Raises whatever storage raises; damaged or missing files are mostly ValueError.
    """
    tree = nested(abstract)
    restore = ocp.args.PyTreeRestore(tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree))
    with ocp.Checkpointer(_handler()) as reader:
        restored = reader.restore(path, ocp.args.Composite(state=restore))
    return named_leaves(restored["state"])


def describe(path: epath.Path) -> dict[str, ArrayInfo]:
    """Shape and dtype of every array of a committed step, from the arrays' own headers on storage.

    Raises whatever storage raises.
    """
    with ocp.Checkpointer(_handler()) as reader:
        tree = reader.metadata(path).item_metadata["state"].tree
    return array_infos(named_leaves(tree))
