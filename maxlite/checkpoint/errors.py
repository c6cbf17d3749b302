"""What goes wrong with checkpoints. A run that ends with one of these exits with status 3."""

from __future__ import annotations

import errno
import os

LONGEST_MESSAGE = 300
_REASONS = sorted({os.strerror(number) for number in errno.errorcode})  # "No space left on device" and its like


class CheckpointError(Exception):
    """A save or a restore failed for good."""


class SaveError(CheckpointError):
    """A state could not be committed to storage."""


class RestoreError(CheckpointError):
    """Checkpoints exist, and the newest good one cannot be read."""


class PeerError(CheckpointError):
    """Another process could not do its part, or did not answer in time."""


class Damage(ValueError):
    """What is on storage is not what was saved."""


def in_words(error: BaseException) -> str:
    """The error and its notes on one line, without the source locations and specs that libraries append."""
    return "; ".join([_message(error), *getattr(error, "__notes__", [])])


def _message(error: BaseException) -> str:
    if isinstance(error, CheckpointError | Damage):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        name = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{name}"
    text = " ".join(str(error).split())
    for tail in (" [tensorstore_spec", " [source locations"):
        text = text.split(tail, 1)[0]
    if len(text) > LONGEST_MESSAGE:  # what failed is at the start, why at the end, long paths between
        short = f"{text[: LONGEST_MESSAGE // 2]} ... {text[-LONGEST_MESSAGE // 2 :]}"
        # A few libraries say it in the middle.
        text = "; ".join([short, *(reason for reason in _REASONS if reason in text and reason not in short)])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
