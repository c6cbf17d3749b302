"""`metrics.jsonl`: one object per logged step, floats written so that they read back exactly."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self


class MetricsFile:
    """Appends to a run's metrics; on a resumed run, lines of steps that will be done again are cut off first.

    A line is on file before its step can be saved, so a run cut anywhere has a line for every logged step up to its
    checkpoint.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        """Opens `path`, keeping the lines of steps up to `resumed_step`."""
        kept, self._last = _lines_up_to(path, resumed_step)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._file, kept)
        self._end = kept

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._file)

    @property
    def last(self) -> Mapping[str, Any]:
        """The last line's object; empty when there is none."""
        return self._last

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one line.

        Raises:
            OSError: the disk is full or gone.
        """
        line = (_encode(record) + "\n").encode()
        self._end += os.pwrite(self._file, line, self._end)
        self._last = dict(record)

    def extend_last(self, values: Mapping[str, Any]) -> None:
        """Adds values to the last line in one write over its end, so that a kill leaves the old line or the new."""
        tail = (", " + _encode(values)[1:] + "\n").encode()
        end = os.pwrite(self._file, tail, self._end - 2)
        self._end += end - 2
        self._last = {**self._last, **values}


def _encode(record: Mapping[str, Any]) -> str:
    """JSON; a number that is not finite, which JSON has not, as null. Python's repr of a float reads back exactly."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(finite, allow_nan=False)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a metrics file, as objects; a last line that was torn by a kill is left out."""
    records = []
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            records.append(json.loads(line))
    return records


def _lines_up_to(path: Path, step: int) -> tuple[int, Mapping[str, Any]]:
    """Length in bytes of the whole lines of steps up to `step`, and the last of them."""
    length, last = 0, {}
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            record = json.loads(line) if line.endswith(b"\n") else None
            if record is None or record["step"] > step:
                break
            length, last = length + len(line), record
    return length, last
