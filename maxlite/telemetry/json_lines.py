"""Files of JSON objects, one a line, that a kill or a bad disk may have cut anywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def encode(record: Mapping[str, Any]) -> str:
    """JSON; a number that is not finite, which JSON has not, as null. Python's repr of a float reads back exactly."""
    return json.dumps(_finite(record), allow_nan=False)


def whole_lines(data: bytes) -> list[tuple[bytes, dict[str, Any]]]:
    """The lines that are whole, each with its object."""
    lines = []
    for line in data.splitlines(keepends=True):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            continue
        if isinstance(record, dict):
            lines.append((line, record))
    return lines


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
