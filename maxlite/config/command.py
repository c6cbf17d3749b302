"""A command's line: `python -m maxlite.X [config.yml] key=value ...`, `--help`, `--print_config`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from maxlite.config.errors import InputError
from maxlite.config.resolve import ConfigT, Resolved, resolve
from maxlite.config.show import config_yaml, help_text

FLAGS = ("-h", "--help", "--print_config")


def read_command(kind: type[ConfigT], arguments: Sequence[str], usage: str) -> Resolved[ConfigT]:
    """The resolved config of a command line; `--help` and `--print_config` print and exit 0 instead.

    Raises:
        InputError: with one line per problem.
        SystemExit: 0 after `--help` or `--print_config`.
    """
    if "-h" in arguments or "--help" in arguments:
        print(usage, help_text(kind), sep="\n", end="")
        raise SystemExit(0)
    rest = [argument for argument in arguments if argument not in FLAGS]
    if not rest:
        raise InputError(f"no config given\n{usage}")
    names_file = not rest[0].startswith("-") and ("=" not in rest[0] or Path(rest[0]).is_file())
    config_file = rest.pop(0) if names_file else None
    resolved = resolve(kind, config_file, rest)
    if "--print_config" in arguments:
        print(config_yaml(resolved.config, resolved.origins), end="")
        raise SystemExit(0)
    return resolved


def report_input_error(error: InputError) -> None:
    """Says on standard error what is wrong, a line each."""
    for problem in error.problems:
        print(f"error: {problem}", file=sys.stderr)
