"""The only module that touches Orbax, so that its churn stays in one file.

Of Orbax this uses the array writer and reader and the atomic step directory. Which steps exist, which are
good and which are kept is decided on what is on storage, because Orbax's own step cache names steps that
failed and forgets steps that are intact.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from maxlite.checkpoint import layout
from maxlite.checkpoint.tree import named_leaves, nested


class _Quiet(logging.Filter):
    """Drops Orbax's log: a dozen lines per save, and hundreds per failed one, from each of its threads again.

    Nothing is lost with it: a failure comes back as an exception, or is found by looking at storage, and is
    then reported once.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.ERROR or "/orbax/" not in record.pathname


logging.getLogger("absl").addFilter(_Quiet())


@functools.cache  # once
def _quiet_unraisable() -> None:
    """Drops what the other reads and writes of a failed operation print when they end after it."""
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        late_write = unraisable.object is None and str(unraisable.exc_value) == "Event loop is closed"
        code = getattr(unraisable.object, "cr_code", None)
        late_read = code is not None and "/orbax/" in code.co_filename
        if not (late_write or late_read):
            previous(unraisable)

    sys.unraisablehook = hook


def _handler() -> ocp.CompositeCheckpointHandler:
    # Uncompressed: zstd takes 8% off weights and doubles the time to commit.
    arrays = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False)
    return ocp.CompositeCheckpointHandler(state=arrays, metadata=ocp.JsonCheckpointHandler(layout.METADATA_FILE))


class Writer:
    """Writes one step at a time in the background."""

    def __init__(self, timeout_seconds: float) -> None:
        _quiet_unraisable()
        # A directory made in the background that cannot be made is noticed at the timeout only, as a timeout.
        options = ocp.AsyncOptions(timeout_secs=math.ceil(timeout_seconds), create_directories_asynchronously=False)
        self._orbax = ocp.AsyncCheckpointer(_handler(), async_options=options)

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
    """Reads the named arrays, and no others, of a committed step, each straight to its sharding in `abstract`.

    Raises whatever storage raises; damaged or missing files are mostly ValueError.
    """
    _quiet_unraisable()
    tree = nested(abstract)
    arguments = ocp.checkpoint_utils.construct_restore_args(tree)
    restore = ocp.args.PyTreeRestore(tree, restore_args=arguments, partial_restore=True)
    with ocp.Checkpointer(_handler()) as reader:
        restored = reader.restore(path, ocp.args.Composite(state=restore))
    return named_leaves(restored["state"])
