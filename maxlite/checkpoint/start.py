"""How a run begins: from its own newest good checkpoint, from another run's, or from nothing."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from etils import epath

from maxlite.checkpoint import layout, storage
from maxlite.checkpoint.errors import PeerError, in_words
from maxlite.checkpoint.peers import Peers
from maxlite.checkpoint.reading import Restored, restore_newest
from maxlite.checkpoint.tree import named_leaves, nested
from maxlite.config import CheckpointConfig, InputError

SHARED_SECONDS = 10.0  # for a file that one process wrote to be seen by the others; NFS caches for a few seconds
PARAMETERS = "params/"


class Start(NamedTuple):
    """The first state of a process. `metadata` is of the checkpoint it is from, None if from no full checkpoint."""

    state: Any
    step: int
    metadata: layout.StepMetadata | None
    resumed: bool  # from the run's own checkpoint


def restore_or_init(
    directory: epath.Path,
    config: CheckpointConfig,
    abstract_state: Any,
    init_fn: Callable[[], Any],
    peers: Peers,
    report: Callable[[str], None],
    record: Callable[..., None],
    admit: Callable[[Mapping[str, Any]], object],
) -> Start:
    """See `Checkpointer.restore_or_init`."""
    restored = None
    if config.enable_checkpointing:
        _prepare(directory, config, peers)
        restored = restore_newest(directory, abstract_state, report, config=config, peers=peers, admit=admit)
    elif existing := layout.steps(directory)[0]:
        raise InputError(
            f"enable_checkpointing=false, but {directory} has a checkpoint of step {existing[0]}: the run would start "
            "anew over it; use another run_name"
        )
    if restored is not None:
        for key in ("load_full_state_path", "load_parameters_path"):
            if getattr(config, key):
                report(f"{key} is not read: the run goes on from its own checkpoints")
        _set_aside(directory, restored, config, peers, report, record)
        record("restored", step=restored.metadata.step, lost=list(restored.damaged), casts=len(restored.casts))
        return Start(_say_casts(restored, report), restored.metadata.step, restored.metadata, resumed=True)
    if config.load_full_state_path is not None:
        restored = _from_elsewhere(
            "load_full_state_path", config.load_full_state_path, abstract_state, report, config, peers, admit=admit
        )
        return Start(_say_casts(restored, report), restored.metadata.step, restored.metadata, resumed=False)
    state = init_fn()
    if config.load_parameters_path is not None:
        state = _with_parameters(state, abstract_state, config.load_parameters_path, report, config, peers)
    return Start(state, 0, None, resumed=False)


def _prepare(directory: epath.Path, config: CheckpointConfig, peers: Peers) -> None:
    """Makes the directory, removes what a killed run left, and sees that all processes mean the same one."""
    error, made = "", False
    probe = directory / f".seen-by-all-{secrets.token_hex(8)}"
    try:
        if peers.primary:
            storage.make_directory(directory)
            for path in storage.leftovers(directory):
                storage.remove(path)
            if peers.count > 1:
                probe.touch()
                made = True
    except OSError as raised:
        error = f"checkpoint directory {directory} cannot be used: {in_words(raised)}"
    try:
        name = peers.exchange(
            "start/probe", probe.name, error=error, timeout_seconds=config.checkpoint_timeout_seconds
        )[0]
        missing = not peers.primary and bool(unseen([directory / name]))
        error = (
            f"checkpoint directory {directory} is not shared: this process does not see what process 0 wrote there; "
            "base_output_directory must be one directory for all processes"
        )
        peers.exchange(
            "start/probed", error=error if missing else "", timeout_seconds=config.checkpoint_timeout_seconds
        )
    except PeerError as raised:
        raise InputError(str(raised)) from raised
    finally:
        if made:
            probe.unlink(missing_ok=True)


def unseen(paths: Sequence[epath.Path]) -> list[epath.Path]:
    """Those of the files, written by other processes just now, that do not appear to this one within a while."""
    deadline = time.monotonic() + SHARED_SECONDS
    while (missing := [path for path in paths if not path.exists()]) and time.monotonic() <= deadline:
        time.sleep(0.1)
    return missing


def _set_aside(
    directory: epath.Path,
    restored: Restored,
    config: CheckpointConfig,
    peers: Peers,
    report: Callable[[str], None],
    record: Callable[..., None],
) -> None:
    """Renames damaged steps, so that no one takes them for checkpoints again; for a person to look at."""
    error = ""
    try:
        for step in restored.damaged if peers.primary else ():
            path = layout.step_path(directory, step)
            aside = storage.set_aside(path)
            report(
                f"checkpoint {path} was renamed to {aside.name}; delete it when nobody wants to look at it any more"
            )
            record("checkpoint_damaged", step=step, renamed=aside.name)
    except OSError as raised:
        error = f"a damaged checkpoint in {directory} cannot be renamed: {in_words(raised)}"
    try:
        peers.exchange("start/set-aside", error=error, timeout_seconds=config.checkpoint_timeout_seconds)
    except PeerError as raised:
        raise InputError(str(raised)) from raised


def _say_casts(restored: Restored, report: Callable[[str], None]) -> Any:
    if restored.casts:
        more = f" and {len(restored.casts) - 1} more arrays" if len(restored.casts) > 1 else ""
        report(f"changed dtype on the way in: {restored.casts[0]}{more}")
    return restored.state


def _from_elsewhere(
    key: str,
    path: str,
    abstract: Any,
    report: Callable[[str], None],
    config: CheckpointConfig,
    peers: Peers,
    **options: Any,
) -> Restored:
    restored = restore_newest(path, abstract, report, config=config, peers=peers, **options)
    if restored is None:
        raise InputError(f"{key}={path}: there is no checkpoint there; name a run, its checkpoints, or one step")
    report(f"{key}: step {restored.metadata.step} of {path}")
    return restored


def _with_parameters(
    state: Any, abstract_state: Any, path: str, report: Callable[[str], None], config: CheckpointConfig, peers: Peers
) -> Any:
    """The state with its parameters read from elsewhere."""
    names = [name for name in named_leaves(abstract_state) if name.startswith(PARAMETERS)]
    abstract = {name: leaf for name, leaf in named_leaves(abstract_state).items() if name in names}
    key = "load_parameters_path"
    restored = _from_elsewhere(key, path, nested(abstract), report, config, peers, partial=True)
    leaves = named_leaves(state) | named_leaves(_say_casts(restored, report))
    return jax.tree.unflatten(jax.tree.structure(state), list(leaves.values()))
