"""Errors that are the user's to mend: reported in a few lines, without a traceback, with exit status 2."""

from __future__ import annotations


class InputError(Exception):
    """Bad config or input: each problem says what is wrong, where it came from, and what to do."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
