"""Tells damage on storage from trouble on the way to it.

Damage lasts: a run goes on from an older step. Trouble passes, or is a person's to solve: a run that went on
from an older step because of it would train over newer good work.
"""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax

from maxlite.checkpoint.errors import RestoreError, in_words
from maxlite.config import InputError

T = TypeVar("T")

RETRY_SECONDS = (1.0, 4.0)  # between the attempts to read

# How TensorStore and XLA begin what is not about the bytes themselves. UNKNOWN: an I/O error, for example.
_TROUBLE = re.compile(
    "(ABORTED|CANCELLED|DEADLINE_EXCEEDED|INTERNAL|PERMISSION_DENIED|RESOURCE_EXHAUSTED|UNAUTHENTICATED|UNAVAILABLE"
    "|UNKNOWN): "
)


def is_damage(error: BaseException) -> bool:
    """Whether the error, met while reading, says that what is on storage is bad or missing."""
    return not any(map(_is_trouble, _chain(error)))


def why(error: BaseException) -> str:
    """The error that the others came from, in words."""
    *_, first = _chain(error)
    return in_words(first)


def patiently(what: str, read: Callable[[], T], report: Callable[[str], None]) -> T:
    """Returns `read()`, tried again while it meets trouble; `what` is named in messages.

    Raises InputError and damage as they are, RestoreError for trouble that stays.
    """
    for delay in (*RETRY_SECONDS, None):
        try:
            return read()
        except InputError:
            raise
        except Exception as error:  # storage libraries raise all kinds
            if is_damage(error):
                raise
            if delay is None:
                raise RestoreError(f"{what} cannot be read now: {why(error)}; nothing was changed") from error
            report(f"{what} cannot be read, next try in {delay:g} s: {why(error)}")
        gc.collect()  # what the failed attempt read
        time.sleep(delay)
    raise AssertionError("the last attempt returns or raises")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and the errors it came from."""
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)


def _is_trouble(error: BaseException) -> bool:
    if isinstance(error, OSError):
        # What should be a file or a directory, and is not there or is the other.
        return not isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    return isinstance(error, MemoryError | jax.errors.JaxRuntimeError) or bool(_TROUBLE.match(str(error)))
