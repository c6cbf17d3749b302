"""How a command ends: its exit statuses, and the errors that are the user's to mend."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit statuses of every command; one that lost something never exits 0."""

    DONE = 0
    BAD_INPUT = 2
    SAVE_FAILED = 3
    DIVERGED = 4
    PREEMPTED = 5


class InputError(Exception):
    """Bad config or input: each problem says what is wrong, where it came from, and what to do."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
