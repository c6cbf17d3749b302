"""`metrics.jsonl`: one object per logged step, floats written so that they read back exactly."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from maxlite.telemetry.json_lines import encode, whole_lines


class MetricsFile:
    """Appends to a run's metrics; on a resumed run, lines of steps that will be done again are cut off first.

    A line is written before its step can be saved, so a run killed anywhere has a line for every logged step up to
    its checkpoint. (A machine that loses power may lose lines: they are not flushed to the disk one by one.)
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        """Opens `path`, keeping the whole lines of steps up to `resumed_step`.

        Raises:
            OSError: the file cannot be read or written.
        """
        before = path.read_bytes() if path.exists() else b""
        kept = [(line, record) for line, record in _parse(before) if record["step"] <= resumed_step]
        content = b"".join(line for line, _ in kept)
        if content != before:
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_bytes(content)
            temporary.replace(path)
        self.last: Mapping[str, Any] = kept[-1][1] if kept else {}  # the last line's object
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._end = len(content)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._file)

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one line.

        Raises:
            OSError: the disk is full or gone.
        """
        self._write((encode(record) + "\n").encode(), self._end)
        self.last = dict(record)

    def extend_last(self, values: Mapping[str, Any]) -> None:
        """Adds values to the last line in one write over its end, so that a kill leaves the old line or the new.

        Raises:
            OSError: the disk is full or gone.
        """
        self._write((", " + encode(values)[1:] + "\n").encode(), self._end - 2)
        self.last = {**self.last, **values}

    def _write(self, data: bytes, at: int) -> None:
        while data:  # a disk that fills up takes a part first, and says so at the next write
            written = os.pwrite(self._file, data, at)
            data, at = data[written:], at + written
        self._end = at


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a metrics file, as objects; what a kill or a bad disk left of others is passed over."""
    return [record for _, record in _parse(path.read_bytes())]


def _parse(data: bytes) -> list[tuple[bytes, dict[str, Any]]]:
    """The whole lines of steps, each with its object."""
    return [(line, record) for line, record in whole_lines(data) if isinstance(record.get("step"), int)]
