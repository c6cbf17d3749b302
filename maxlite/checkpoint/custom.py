"""A person's own policies, when to save and what to keep: what they are given, how they are loaded and called.

docs/checkpoint_policies.md shows one of each.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from maxlite.checkpoint.errors import in_words
from maxlite.config import InputError


class SaveContext(NamedTuple):
    """What a save policy is told after every step."""

    step: int  # updates done
    saving: bool  # a save is being written
    last_started_step: int | None  # None: nothing has been saved and nothing restored
    last_committed_step: int | None  # the step a restart would resume from; None: none yet
    seconds_since_start: float | None  # since the last save started, committed or not, or the run resumed
    seconds_since_commit: float | None  # since the last one was committed, or the run resumed


class KeptStep(NamedTuple):
    """One checkpoint on storage."""

    step: int
    created: float  # seconds since 1970
    metrics: Mapping[str, float]  # of the step: `loss`, and `eval_loss` where it was evaluated
    verified: bool  # known to be good


class SavePolicyProtocol(Protocol):
    """Decides when to save: `checkpoint_save_policy`. Made once per run, without arguments."""

    def should_save(self, context: SaveContext, /) -> bool:
        """Whether the state after `context.step` updates should be saved; asked once per step from step 1 on.

        In a run of several processes only the first one asks. While a save is being written, or one that
        failed waits to be tried again, True is remembered until the next save starts.
        """
        ...


class PreservationPolicyProtocol(Protocol):
    """Decides what to keep: `checkpoint_preservation_policy`. Made once per run, without arguments."""

    def steps_to_keep(self, steps: Sequence[KeptStep], /) -> Collection[int]:
        """Which of `steps`, oldest first, to keep beside what the config keeps; other numbers mean nothing."""
        ...


def load_save_policy(path: str) -> SavePolicyProtocol:
    """An instance of the class that `checkpoint_save_policy` names; InputError says what is wrong with it."""
    return _load("checkpoint_save_policy", path, "should_save")


def load_preservation_policy(path: str) -> PreservationPolicyProtocol:
    """An instance of the class that `checkpoint_preservation_policy` names; InputError says what is wrong with it."""
    return _load("checkpoint_preservation_policy", path, "steps_to_keep")


def ask_should_save(policy: SavePolicyProtocol, context: SaveContext) -> bool:
    """The policy's answer; InputError with its class's name if it raises or the answer is not true or false."""
    answer = _call(policy.should_save, context)
    if not isinstance(answer, (bool, np.bool_)):  # a forgotten `return` is no answer
        raise InputError(f"{_name(policy.should_save)} returned {answer!r}, not True or False")
    return bool(answer)


def ask_steps_to_keep(policy: PreservationPolicyProtocol, steps: Sequence[KeptStep]) -> Collection[int]:
    """The policy's answer; InputError with its class's name if it raises or the answer is not a collection."""
    answer = _call(policy.steps_to_keep, steps)
    if not isinstance(answer, Collection) or not all(isinstance(step, (int, np.integer)) for step in answer):
        raise InputError(f"{_name(policy.steps_to_keep)} returned {answer!r}, not a collection of steps")
    return answer


def _load(key: str, path: str, method: str) -> Any:
    where = f"{key}={path}"
    module_name, _, class_name = path.rpartition(".")
    if not all(part.isidentifier() for part in path.split(".")) or not module_name:
        raise InputError(f"{where}: write package.module.Class")
    _let_import_from_current_directory()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of the user's may raise anything
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise InputError(
                f"{where}: there is no module {error.name}, neither installed, nor in PYTHONPATH or {Path.cwd()}"
            ) from error
        raise InputError(f"{where}: the module {module_name} cannot be imported: {_in_words(error)}") from error
    policy_class = getattr(module, class_name, None)
    if not inspect.isclass(policy_class):
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        near = difflib.get_close_matches(class_name, classes, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        problem = "is not a class" if policy_class is not None else f"is not in {module.__file__ or module_name}"
        raise InputError(f"{where}: {class_name} {problem}{hint}")
    if not callable(getattr(policy_class, method, None)):
        raise InputError(f"{where}: the class has no method {method}; see docs/checkpoint_policies.md")
    try:
        policy = policy_class()
    except Exception as error:  # as above
        raise InputError(f"{where}: {class_name}() raised {_in_words(error)}") from error
    try:
        inspect.signature(getattr(policy, method)).bind(None)
    except TypeError as error:
        raise InputError(f"{where}: {method} must take one argument; see docs/checkpoint_policies.md") from error
    return policy


def _let_import_from_current_directory() -> None:
    """As `python -m` does; last, and for good, since a policy may import its neighbours when it is called."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def _call(method: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return method(argument)
    except Exception as error:  # a method of the user's may raise anything
        raise InputError(f"{_name(method)} raised {_in_words(error)}") from error


def _name(method: Callable[[Any], Any]) -> str:
    return f"{method.__module__}.{getattr(method, '__qualname__', method)}"


def _in_words(error: Exception) -> str:
    """What was raised, and by which line, since an InputError is shown without a traceback."""
    if isinstance(error, SyntaxError):  # says where by itself
        return in_words(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = next(frame for frame in reversed(frames) if not frame.filename.startswith("<frozen"))
    return f"{in_words(error)} ({place.filename}:{place.lineno})"
