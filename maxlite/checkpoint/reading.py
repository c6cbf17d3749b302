"""Finding, reading and checking the newest good checkpoint."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
from etils import epath

from maxlite.checkpoint import integrity, layout, storage
from maxlite.checkpoint.arrays import read_checked, read_state
from maxlite.checkpoint.errors import Damage, RestoreError
from maxlite.checkpoint.faults import patiently, why
from maxlite.checkpoint.peers import Peers
from maxlite.checkpoint.tree import named_leaves
from maxlite.config import CheckpointConfig, InputError

T = TypeVar("T")


class Restored(NamedTuple):
    """A state read from storage, and the newer steps that are damaged."""

    state: Any
    metadata: layout.StepMetadata
    damaged: tuple[int, ...]
    casts: list[str]  # arrays that were saved in another dtype, in words


def restore_newest(
    path: str | PathLike[str],
    abstract_state: Any,
    report: Callable[[str], None] = print,
    *,
    partial: bool = False,
    config: CheckpointConfig | None = None,
    peers: Peers | None = None,
    admit: Callable[[Mapping[str, Any]], object] = lambda run: None,
) -> Restored | None:
    """Restores the newest good step, each array to its sharding and dtype; None if there is no committed step.

    `path` is a run directory, its checkpoints, or one step. Changes nothing on storage. With `partial`, only the
    arrays that `abstract_state` names are read, for example the parameters alone:
    `restore_newest(path, {"params": abstract_params}, partial=True)`.

    `admit` is given what the run recorded in the step, before its arrays are read, and raises InputError if it
    will not have it. `checkpoint_verify` of `config` says what makes a step good. A damaged step is reported and
    left as it is, and the next older one is tried. Raises InputError if a readable step has another structure than
    `abstract_state` or a newer maxlite wrote it, RestoreError if there are committed steps and all are damaged, or
    if storage or memory fails in another way, several times: then the newest step may be good, and an older one
    would not be the newest good one.
    """
    config, reading = config or CheckpointConfig(), _Reading(report, peers or Peers())
    directory, only = layout.locate(storage.absolute(path))
    committed, torn = reading.list_steps(directory, config)
    if only is not None:
        committed, torn = [step for step in committed if step == only], [step for step in torn if step == only]
    damaged = dict.fromkeys(torn, "it has no commit marker")  # step: why
    for step in committed:
        step_path = layout.step_path(directory, step)
        try:
            state, metadata, casts = reading.read(step_path, step, abstract_state, partial, config, admit)
        except Damage as error:
            damaged[step] = str(error)
        else:
            newer = tuple(number for number in damaged if number > step)
            for number in sorted(newer, reverse=True):
                report(f"checkpoint {layout.step_path(directory, number)} is damaged: {damaged[number]}")
            if newer:
                report(f"falling back to step {step}: {max(newer) - step} steps are lost to the damage")
            return Restored(state, metadata, tuple(damaged), casts)
        gc.collect()  # or what was read of the damaged step stays in memory while an older one is read
    if damaged:
        none = "the only checkpoint" if len(damaged) == 1 else f"each of the {len(damaged)} checkpoints"
        raise RestoreError(
            f"{none} in {directory} is damaged; nothing was changed. "
            + "; ".join(f"step {step}: {damaged[step]}" for step in sorted(damaged, reverse=True)[:3])
        )
    return None


def check_step(
    path: str | PathLike[str],
    report: Callable[[str], None] = print,
    *,
    abstract_state: Any = None,
    config: CheckpointConfig | None = None,
    peers: Peers | None = None,
) -> str:
    """What is wrong with one step, in words; empty if every array is what was saved.

    Reads all of it, in memory for a few arrays. `abstract_state` gives the structure that is wanted and shardings to
    read to; None: that of the checkpoint, on the first device. Raises RestoreError if the step cannot be read now
    for a reason that says nothing about it, InputError if a newer maxlite wrote it.
    """
    step_path = storage.absolute(path)
    try:
        _Reading(report, peers or Peers()).check(
            step_path, int(step_path.name), abstract_state, config or CheckpointConfig()
        )
    except Damage as error:
        return str(error)
    return ""


def _metadata_of(path: epath.Path, step: int, config: CheckpointConfig) -> layout.StepMetadata:
    """What the step says about itself, checked before a word of it is believed."""
    if not layout.is_committed(path):
        raise Damage("it has no commit marker")
    problem = None
    if config.checkpoint_verify != "off":
        try:
            record = integrity.read(path)
        except Damage as error:
            problem = error  # or a newer maxlite wrote it, which its metadata tells
        else:
            integrity.require_files(path, record, only=layout.METADATA_FILE)
    metadata = layout.read_metadata(path)
    if problem is not None:
        raise problem
    if metadata.step != step:
        raise Damage(f"it is a copy of step {metadata.step} under another name")
    return metadata


_COUNT = itertools.count()  # of readings in this process; the same on all processes


class _Reading:
    """What every process does the same way: if one meets an error, all of them raise one of that kind."""

    def __init__(self, report: Callable[[str], None], peers: Peers) -> None:
        self._report = report
        self._peers = peers
        self._number = next(_COUNT)

    def list_steps(self, directory: epath.Path, config: CheckpointConfig) -> tuple[list[int], list[int]]:
        """Committed and torn steps, newest first, as the primary process sees them."""
        what = f"checkpoint directory {directory}"
        timeout = config.checkpoint_timeout_seconds
        found = self.together(
            f"steps/{self._number}",
            lambda: json.dumps(patiently(what, lambda: layout.steps(directory), self._report)),
            timeout,
        )
        committed, torn = json.loads(found[0])
        return committed, torn

    def read(
        self,
        path: epath.Path,
        step: int,
        abstract_state: Any,
        partial: bool,
        config: CheckpointConfig,
        admit: Callable[[Mapping[str, Any]], object],
    ) -> tuple[Any, layout.StepMetadata, list[str]]:
        """Reads and checks one step. Raises Damage, InputError or RestoreError, the same on every process."""
        agree = self._agree_on(path, config)
        metadata = agree(lambda: _metadata_of(path, step, config))
        agree(lambda: admit(metadata.run))
        state, casts = read_state(path, metadata, abstract_state, partial, config, agree)
        return state, metadata, casts

    def check(self, path: epath.Path, step: int, abstract_state: Any, config: CheckpointConfig) -> None:
        """Reads and checks one step and keeps nothing of it. Raises as `read` does."""
        agree = self._agree_on(path, config)
        metadata = agree(lambda: _metadata_of(path, step, config))
        if abstract_state is None:
            one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            wanted = {
                name: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=one_device)
                for name, info in metadata.arrays.items()
            }
        else:
            leaves = named_leaves(abstract_state).items()
            wanted = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in leaves}
        for _ in read_checked(path, metadata, wanted, False, config, agree):
            pass

    def _agree_on(self, path: epath.Path, config: CheckpointConfig) -> Callable[[Callable[[], Any]], Any]:
        parts = itertools.count()

        def agree(part: Callable[[], T]) -> T:
            result: list[T] = []

            def here() -> str:
                result.append(patiently(f"checkpoint {path}", part, self._report))
                return ""

            self.together(f"{path.name}/{self._number}/{next(parts)}", here, config.checkpoint_timeout_seconds)
            return result[0]

        return agree

    def together(self, topic: str, part: Callable[[], str], timeout_seconds: float) -> list[str]:
        """Every process's text. Raises the gravest error that any process met: InputError, RestoreError or Damage."""
        kind, said, mine = "fine", "", None
        try:
            said = part()
        except InputError as error:
            kind, said, mine = "input", "\n".join(error.problems), error
        except RestoreError as error:
            kind, said, mine = "trouble", str(error), error
        except Exception as error:  # damage, of all kinds
            kind, said, mine = "damage", why(error), error
        answers = [
            json.loads(text)
            for text in self._peers.exchange(
                f"read/{topic}", json.dumps([kind, said]), timeout_seconds=timeout_seconds
            )
        ]
        for grave in ("input", "trouble", "damage"):
            if kind == grave:
                _raise(kind, said, mine)
            for index, (theirs, words) in enumerate(answers):
                if theirs == grave:
                    _raise(grave, f"process {index}: {words}", None)
        return [words for _, words in answers]


def _raise(kind: str, words: str, cause: Exception | None) -> NoReturn:
    if kind == "input":
        raise InputError(*words.split("\n")) from cause
    raise (RestoreError if kind == "trouble" else Damage)(words) from cause
