"""The only module that touches Orbax, so that its churn stays in one file.

Of Orbax this uses the array writer and reader and the atomic step directory. Which steps exist, which are
good and which are kept is decided on what is on storage, because Orbax's own step cache names steps that
failed and forgets steps that are intact.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from maxlite.checkpoint import layout
from maxlite.checkpoint.tree import ArrayInfo, array_infos, named_leaves, nested

_ORBAX = f"{Path(ocp.__file__).parent}{os.sep}"


def _from_orbax(record: logging.LogRecord) -> bool:
    return record.levelno <= logging.ERROR and record.pathname.startswith(_ORBAX)


class _Quiet:
    """Drops Orbax's log while at least one `with quiet:` is open, and what its failed operations print late.

    The log is a dozen lines per save, and hundreds per failed one, from each of Orbax's threads again. Nothing
    is lost with it: a failure comes back as an exception, or is found by looking at storage, and is then
    reported once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._failed = False
        self._previous = sys.unraisablehook

    def __enter__(self) -> None:
        with self._lock:
            self._open += 1
            if self._open == 1:
                logging.getLogger("absl").addFilter(self._filter)
                if sys.unraisablehook != self._hook:
                    self._previous, sys.unraisablehook = sys.unraisablehook, self._hook

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.failed()
        with self._lock:
            self._open -= 1
            if self._open == 0:
                logging.getLogger("absl").removeFilter(self._filter)
                if sys.unraisablehook == self._hook and not self._failed:  # not someone else's
                    sys.unraisablehook = self._previous

    def failed(self) -> None:
        """An operation failed: the hook stays, as its other reads and writes end at a time no one knows."""
        self._failed = True

    def _filter(self, record: logging.LogRecord) -> bool:
        return not _from_orbax(record)

    def _hook(self, unraisable: Any) -> None:
        late_write = unraisable.object is None and str(unraisable.exc_value) == "Event loop is closed"
        code = getattr(unraisable.object, "cr_code", None)
        late_read = code is not None and code.co_filename.startswith(_ORBAX)
        if not (self._open or self._failed) or not (late_write or late_read):
            self._previous(unraisable)


quiet = _Quiet()


def _handler() -> ocp.CompositeCheckpointHandler:
    # Uncompressed: a save takes no processor time from the training beside it.
    arrays = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False)
    return ocp.CompositeCheckpointHandler(state=arrays, metadata=ocp.JsonCheckpointHandler(layout.METADATA_FILE))


class Writer:
    """Writes one step at a time in the background. Its user holds `quiet` open for as long as it may print."""

    def __init__(self, timeout_seconds: float) -> None:
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
    tree = nested(abstract)
    arguments = ocp.checkpoint_utils.construct_restore_args(tree)
    restore = ocp.args.PyTreeRestore(tree, restore_args=arguments, partial_restore=True)
    with quiet, ocp.Checkpointer(_handler()) as reader:
        restored = reader.restore(path, ocp.args.Composite(state=restore))
    return named_leaves(restored["state"])


def describe(path: epath.Path) -> dict[str, ArrayInfo]:
    """Shape and dtype of every array of a committed step, from the arrays' own headers on storage.

    Raises whatever storage raises.
    """
    with quiet, ocp.Checkpointer(_handler()) as reader:
        tree = reader.metadata(path).item_metadata["state"].tree
    return array_infos(named_leaves(tree))
