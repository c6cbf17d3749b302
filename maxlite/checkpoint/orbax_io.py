"""The only module that touches Orbax, so that its churn stays in one file.

Of Orbax this uses the writer and reader of arrays. The step directory, its commit, what the processes of a run tell
each other and which steps exist, are good and are kept, are maxlite's own: when one process cannot write, Orbax's
others wait out the whole timeout and then stop saving without a word, and its step cache names steps that failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint._src.serialization import tensorstore_utils, type_handler_registry

from maxlite.checkpoint.tree import ArrayInfo, array_infos, named_leaves, nested
from maxlite.config import CheckpointConfig

_DEFAULTS = CheckpointConfig()
# Counts bytes for a monitor that nobody reads, and TensorStore leaks 17 KB at every count, twice a save: a run that
# saves every few seconds for weeks would die of it. A test of many saves says if this name is another one day.
tensorstore_utils.get_tensorstore_raw_bytes = lambda *arguments, **keywords: 0

_ORBAX = f"{Path(ocp.__file__).parent}{os.sep}"


def _from_orbax(record: logging.LogRecord) -> bool:
    return record.levelno <= logging.ERROR and record.pathname.startswith(_ORBAX)


def _not_retrieved(record: logging.LogRecord) -> bool:
    """Whether asyncio says that a part of one of Orbax's operations failed after another part had failed it."""
    if not record.exc_info or "exception was never retrieved" not in record.getMessage():
        return False
    frames = traceback.walk_tb(record.exc_info[2])
    return any(frame.f_code.co_filename.startswith(_ORBAX) for frame, _ in frames)


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
                logging.getLogger("asyncio").addFilter(self._late_filter)
                if sys.unraisablehook != self._hook:
                    self._previous, sys.unraisablehook = sys.unraisablehook, self._hook

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.failed()
        with self._lock:
            self._open -= 1
            if self._open == 0:
                logging.getLogger("absl").removeFilter(self._filter)
                if not self._failed:
                    logging.getLogger("asyncio").removeFilter(self._late_filter)
                if sys.unraisablehook == self._hook and not self._failed:  # not someone else's
                    sys.unraisablehook = self._previous

    def failed(self) -> None:
        """An operation failed: what it prints late stays dropped, as its other parts end at a time no one knows."""
        self._failed = True

    def _filter(self, record: logging.LogRecord) -> bool:
        return not _from_orbax(record)

    def _late_filter(self, record: logging.LogRecord) -> bool:
        return not _not_retrieved(record)

    def _hook(self, unraisable: Any) -> None:
        late_write = unraisable.object is None and str(unraisable.exc_value) == "Event loop is closed"
        code = getattr(unraisable.object, "cr_code", None)
        late_read = code is not None and code.co_filename.startswith(_ORBAX)
        if not (self._open or self._failed) or not (late_write or late_read):
            self._previous(unraisable)


quiet = _Quiet()


def _handler(config: CheckpointConfig, *, local: bool = True) -> ocp.PyTreeCheckpointHandler:
    use_ocdbt, gigabytes = config.checkpoint_storage_use_ocdbt, config.checkpoint_storage_concurrent_gb
    # Orbax's own limits, unless one is asked for: with any limit its writes are no longer one transaction.
    limits: dict[str, Any] = {}
    if gigabytes is not None:
        limits = {"save_concurrent_gb": gigabytes, "restore_concurrent_gb": gigabytes}
    handler = ocp.PyTreeCheckpointHandler(
        # A file per array and shard is written faster than a few large ones (benchmarks/NOTES.md), and many small
        # objects are what object stores are slowest with.
        use_ocdbt=not local if use_ocdbt is None else use_ocdbt,
        use_zarr3=config.checkpoint_storage_use_zarr3,
        use_compression=config.checkpoint_storage_compression,
        **limits,
    )
    # Each process makes the directory of the arrays' metadata that it needs. Orbax's others wait 10 minutes for the
    # primary's, which never comes when the primary's own write has failed.
    registry = type_handler_registry.GLOBAL_TYPE_HANDLER_REGISTRY
    if metadata := array_metadata_store.resolve_array_metadata_store(registry):
        metadata.set_primary_host(None)
    return handler


class Writer:
    """Writes one state at a time. Its user holds `quiet` open for as long as it may print."""

    def __init__(self, config: CheckpointConfig, *, local: bool = True) -> None:
        self._handler = _handler(config, local=local)
        self._writing: list[Any] = []

    def start(self, directory: epath.Path, arrays: Mapping[str, jax.Array]) -> None:
        """Starts to write this process's part of the arrays; returns once they may be donated.

        `directory` exists. Raises whatever storage raises. On CPU the snapshot is the array itself, and XLA copies
        instead of donating while it is held.
        """
        save = self._handler.async_save(directory, args=ocp.args.PyTreeSave(nested(arrays)))
        self._writing = asyncio.run(save) or []

    def finish(self) -> None:
        """Blocks until this process's part is on storage; raises what went wrong in the background."""
        writing, self._writing = self._writing, []
        for future in writing:
            future.result()

    def merge(self, directory: epath.Path) -> None:
        """Makes one whole of what all processes wrote; for one process to call, when all have finished."""
        self._handler.finalize(directory)

    def close(self) -> None:
        """Releases threads and files."""
        self._handler.close()


def read_arrays(
    directory: epath.Path, abstract: Mapping[str, jax.ShapeDtypeStruct], config: CheckpointConfig = _DEFAULTS
) -> dict[str, jax.Array]:
    """Reads the named arrays, and no others, each straight to its sharding in `abstract`.

    How they were laid out is found on storage. Raises whatever storage raises; damaged or missing files are mostly
    ValueError.
    """
    tree = nested(abstract)
    arguments = ocp.checkpoint_utils.construct_restore_args(tree)
    restore = ocp.args.PyTreeRestore(tree, restore_args=arguments, partial_restore=True)
    with quiet, contextlib.closing(_handler(config)) as handler:
        return named_leaves(handler.restore(directory, args=restore))


def describe(directory: epath.Path) -> dict[str, ArrayInfo]:
    """Shape and dtype of every array, from the arrays' own headers on storage. Raises whatever storage raises."""
    with quiet, contextlib.closing(_handler(_DEFAULTS)) as handler:
        return array_infos(named_leaves(handler.metadata(directory).tree))
