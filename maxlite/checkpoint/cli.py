"""The command line of `python -m maxlite.checkpoint`: arguments, and how errors end."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from maxlite.checkpoint.errors import CheckpointError, Damage, in_words
from maxlite.config import Exit, InputError, report_input_error

PROGRAM = "python -m maxlite.checkpoint"
PATH_HELP = "a run directory, its checkpoints/, or one step"
STATUSES = "exit status: 0 done, 2 bad input, 3 a checkpoint is damaged or cannot be read"

CLOSED_PIPE = 141  # what a shell gives for a program that SIGPIPE ended


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every command of maxlite does."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    try:
        options = _parser().parse_args(arguments)
        # Each command is its own module, so that bad input and `--help` wait for none of them.
        status = importlib.import_module(f"maxlite.checkpoint.cli_{options.command}").run(options)
        sys.stdout.flush()  # a closed pipe is noticed here, and not while the interpreter ends
        return status
    except InputError as error:
        report_input_error(error)
        return Exit.BAD_INPUT
    except (CheckpointError, Damage) as error:
        print(f"error: {error}", file=sys.stderr)
        return Exit.SAVE_FAILED
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except OSError as error:
        print(f"error: {in_words(error)}", file=sys.stderr)
        return Exit.BAD_INPUT
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, description="Looks after the checkpoints of a run.", epilog=STATUSES)
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|show|verify|diff|prune")

    def add(name: str, summary: str, description: str, epilog: str = STATUSES) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}. {description}", epilog=epilog
        )
        command.add_argument("--json", action="store_true", help="print JSON")
        return command

    command = add(
        "list",
        "the steps of a run, newest first",
        "A step is verified when its commit marker, its integrity record and all its files are there, every file "
        "with its size and small files with their digests. The arrays themselves are only read by `verify`. Also "
        "lists what is no checkpoint: torn (no commit marker), set aside (damaged, renamed when a run resumed), "
        "unfinished (being written, or left by a killed run), being deleted. `created` in JSON: seconds since 1970.",
    )
    command.add_argument("path", metavar="PATH", help=PATH_HELP)

    command = add(
        "show",
        "what one step holds, without reading its arrays",
        "Time, parent step, versions, the config keys that differ from their defaults, and the tree of arrays with "
        "shapes, dtypes, shardings as they were when saved, and sizes.",
    )
    command.add_argument("path", metavar="PATH", help=f"{PATH_HELP}; the newest committed step unless it names one")

    command = add(
        "verify",
        "read every array of a step, or of all steps, and compare it with what was saved",
        "Needs memory for a few arrays.",
        "exit status: 0 all is good, 2 bad input, 3 something is damaged or cannot be read",
    )
    command.add_argument("path", metavar="PATH", help=PATH_HELP)

    command = add(
        "diff",
        "how two steps differ, array by array",
        "Arrays are read one at a time, with memory for two, and checked against what was saved. max |a-b| and "
        "|a-b|/|a| (Euclidean norms) are computed in float64; null in JSON: not finite or not comparable. NaNs of the "
        "same bits are equal.",
        "exit status: 0 the arrays are equal bit for bit, 1 they are not, 2 bad input, 3 damaged or not readable",
    )
    command.add_argument("a", metavar="A", help=f"{PATH_HELP}; the newest committed step unless it names one")
    command.add_argument("b", metavar="B", help="as A; may be of another run")

    command = add(
        "prune",
        "delete steps by hand",
        "Shows what would go; --yes deletes it. The newest good step is never deleted: it is found by reading it. "
        "Refused while a run is training there.",
    )
    command.add_argument("path", metavar="PATH", help="a run directory, or its checkpoints/")
    command.add_argument("--keep", type=_positive, metavar="N", help="keep the newest N steps")
    command.add_argument("--keep-every", type=_positive, metavar="N", help="keep the steps that N divides")
    command.add_argument("--steps", type=_steps, metavar="10,20", help="delete these steps")
    command.add_argument("--set-aside", action="store_true", help="delete directories that were set aside as damaged")
    command.add_argument("--leftovers", action="store_true", help="delete unfinished saves and deletions")
    command.add_argument("--yes", action="store_true", help="delete, rather than show what would be deleted")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _steps(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of steps such as 10,20")
    return sorted({int(part) for part in parts})
