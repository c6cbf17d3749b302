"""Trains a model: `python -m maxlite.train config.yml key=value ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from maxlite.config import Config, InputError, read_command, report_input_error

USAGE = "usage: python -m maxlite.train [config.yml] [key=value ...] [--print_config] [--help]"


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    try:
        read_command(Config, arguments, USAGE)
    except InputError as error:
        report_input_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
