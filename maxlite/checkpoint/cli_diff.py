"""`python -m maxlite.checkpoint diff`."""

from __future__ import annotations

import argparse
import json
import sys

from maxlite.checkpoint.cli_text import count
from maxlite.checkpoint.devices import compute_on_cpu
from maxlite.checkpoint.inventory import find_step

EQUAL, DIFFERENT = 0, 1


def run(options: argparse.Namespace) -> int:
    """Compares, printing what differs as it is found; returns the exit status. Raises InputError, RestoreError."""
    paths = [find_step(options.a), find_step(options.b)]
    compute_on_cpu()
    from maxlite.checkpoint.comparing import Comparison, Step, compare

    a, b = (Step(path, lambda line: print(line, file=sys.stderr)) for path in paths)
    names = a.metadata.arrays.keys() | b.metadata.arrays.keys()
    width = max(map(len, names), default=0)

    def line(each: Comparison) -> str:
        if each.a is None or each.b is None:
            return f"{each.name:<{width}}  only in {'B' if each.a is None else 'A'}: {each.b or each.a}"
        kinds = f"{each.a}" if each.a == each.b else f"{each.a} -> {each.b}"
        if each.max_abs is None:
            return f"{each.name:<{width}}  {kinds}"
        return f"{each.name:<{width}}  max |a-b| {each.max_abs:<9.3g}  |a-b|/|a| {each.relative:<9.3g}  {kinds}"

    if not options.json:
        print(f"A  {a.path}", f"B  {b.path}", sep="\n", flush=True)
    found = []
    for each in compare(a, b):
        found.append(each)
        if not each.equal and not options.json:
            print(line(each), flush=True)
    different = [each for each in found if not each.equal]
    if options.json:
        entries = [each.to_json() for each in found]
        steps = {side: {"path": str(step.path), "step": step.metadata.step} for side, step in (("a", a), ("b", b))}
        print(json.dumps({"equal": not different, **steps, "arrays": entries}, indent=1))
    elif different:
        equal = len(found) - len(different)
        print(f"{count(len(different), 'array differs', 'arrays differ')}, {equal} are equal bit for bit")
    else:
        print(f"all {count(len(found), 'array', 'arrays')} are equal bit for bit")
    return DIFFERENT if different else EQUAL
