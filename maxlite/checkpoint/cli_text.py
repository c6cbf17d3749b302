"""Plain text for the commands: ages, counts, aligned tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime

_TIMES = (("d", 86400), ("h", 3600), ("min", 60))


def duration(seconds: float) -> str:
    """`3 d 4 h`, `2 h 5 min`, `12 min`, `40 s`; nothing is shorter than 0 s (clocks differ between machines)."""
    left, parts = max(0, round(seconds)), []
    for unit, one in _TIMES:
        if left >= one:
            parts.append(f"{left // one} {unit}")
            left %= one
    return " ".join(parts[:2]) if parts else f"{left} s"


def moment(created: float) -> str:
    """Seconds since 1970 as local date and time."""
    return datetime.fromtimestamp(created).astimezone().isoformat(sep=" ", timespec="seconds")


def count(number: int, one: str, more: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number:,} {one if number == 1 else more}"


def json_number(value: float | None) -> float | None:
    """The value; None for NaN and infinities, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def table(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """The rows as aligned lines; columns in `left` to the left, others to the right. The first row is the header.

    A column with nothing under its header is left out.
    """
    columns = list(zip(*rows, strict=True))
    kept = [i for i, column in enumerate(columns) if any(column[1:])]
    widths = {i: max(map(len, columns[i])) for i in kept}
    cells = [[row[i].ljust(widths[i]) if i in left else row[i].rjust(widths[i]) for i in kept] for row in rows]
    return ["  ".join(row).rstrip() for row in cells]
