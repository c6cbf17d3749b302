"""What the large presets need of TPUs, by the real compiler on this machine; writes results/tpu_compile.json.

    python benchmarks/tpu_compile.py                       every case
    python benchmarks/tpu_compile.py llama3.1-70b          the cases whose name starts so
    python benchmarks/tpu_compile.py --dry-run             the commands

Each case is the command that a person would type, in a process of its own. Results of other cases are kept, so a case
can be run again alone. The wall time of a compilation depends on what else the machine does; nothing else here does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "tpu_compile.json"
CASES = {
    "llama3.1-70b on 2 x v5p-128": ["configs/llama3.1-70b.yml"],
    "llama3.1-8b on v5e-256": ["configs/llama3.1-8b.yml"],
    "llama3.1-8b on v6e-256": ["configs/llama3.1-8b.yml", "compile_topology=v6e-256", "per_device_batch_size=4"],
    "llama3.1-405b on 4 x v5p-1024": ["configs/llama3.1-405b.yml"],
}


def command(case: str) -> list[str]:
    """What is run for a case."""
    return [sys.executable, "-m", "maxlite.compile", *CASES[case], "--json"]


def measure(case: str) -> dict[str, Any]:
    """The report of one case, with the command and the machine it was made on."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command(case), cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if ran.returncode not in (0, 2) or not ran.stdout:
        raise SystemExit(f"{case}: exit {ran.returncode}")
    machine = {"python": platform.python_version(), "cpus": os.cpu_count(), "machine": platform.machine()}
    return {"command": shlex.join(["python", *command(case)[1:]]), "machine": machine, **json.loads(ran.stdout)}


def line(case: str, result: dict[str, Any]) -> str:
    """One row for people."""
    hbm = result["hbm"]
    words = f"{case:<32} {'fits' if result['fits'] else 'DOES NOT FIT':<13}"
    numbers = [hbm["arguments"], hbm["temporaries"], hbm["total"], hbm["capacity"], result["bytes_accessed"] or 0]
    return words + "".join(f"{number / 1e9:>9.2f}" for number in numbers) + f"{result['compile_seconds']:>8.0f} s"


def main() -> None:
    """Runs the cases that are asked for, one at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    wanted = [case for case in CASES if not options.cases or case.startswith(tuple(options.cases))]
    if not wanted:
        parser.error(f"no such case; there are {', '.join(CASES)}")
    if options.dry_run:
        print(*(shlex.join(command(case)) for case in wanted), sep="\n")
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    titles = ("arguments", "temp", "total", "capacity", "accessed")
    print(" " * 46 + "".join(f"{title:>9}" for title in titles) + "   (GB a device)")
    for case in wanted:
        results[case] = measure(case)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
        print(line(case, results[case]), flush=True)


if __name__ == "__main__":
    main()
