"""What continuous checkpoints cost and save: one training run under several ways of saving.

    python benchmarks/continuous.py                          250 steps of configs/quickstart.yml in each mode
    python benchmarks/continuous.py --steps 600 base_emb_dim=256

Each mode is the real command in a process of its own, from nothing, one after the other in every round; the medians
over the rounds are printed. Steps are timed as the run itself logs them (to the moment a step's result is ready).
The end of each step and of each save is taken from the run's lines and its events. Kills are not made but computed:
at --kills random instants of the training, the steps that a run killed there would have to do again are those since
the newest commit. Goodput is the share of wall time that moved the final model forward, for a failure every
--mtbf-minutes: steps x the median step without saves, over the wall time of the training plus, for every failure,
the steps lost in the mean and the measured time from starting the command to its first step.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODES = {
    "no saves": ["enable_checkpointing=false"],
    "every 100 steps": ["enable_continuous_checkpointing=false", "checkpoint_period=100"],
    "continuous": ["enable_continuous_checkpointing=true"],
    "continuous, 5%": ["enable_continuous_checkpointing=true", "continuous_checkpointing_max_overhead=0.05"],
}
STEP_LINE = re.compile(r"step (\d+)/\d+  loss .*?([\d.]+) s/step")
WARM_UP = 20  # steps left out of the medians: the first saves and the budget's baseline


class Run:
    """One run: when each step ended, how long it took, and when each state was committed."""

    def __init__(self, mode: str, arguments: argparse.Namespace, directory: Path) -> None:
        self.ends: list[tuple[float, int]] = []
        self.seconds: dict[int, float] = {}
        command = [sys.executable, "-m", "maxlite.train", arguments.config, f"steps={arguments.steps}", "log_period=1"]
        command += ["eval_steps=0", f"base_output_directory={directory}", "run_name=bench", *MODES[mode]]
        start = time.time()
        process = subprocess.Popen([*command, *arguments.overrides], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if found := STEP_LINE.match(line):
                self.ends.append((time.time(), int(found[1])))
                self.seconds[int(found[1])] = float(found[2])
        if process.wait() != 0:
            sys.exit(f"{mode}: exit status {process.returncode}")
        self.start_up_seconds = self.ends[0][0] - start
        events_file = directory / "bench" / "events.jsonl"
        events = [json.loads(line) for line in events_file.read_text().splitlines()] if events_file.exists() else []
        self.commits = [(event["time"], event["step"]) for event in events if event["event"] == "save"]
        # The last save is the final one, after training.
        self.intervals = [after[1] - before[1] for before, after in zip(self.commits, self.commits[1:], strict=False)]

    @property
    def wall_seconds(self) -> float:
        """From the end of the first step to the end of the last."""
        return self.ends[-1][0] - self.ends[0][0]

    def steps_lost(self, kills: int) -> float:
        """Mean over random instants of the steps since the newest commit (since the start, before the first)."""
        rng, lost = random.Random(0), []
        for _ in range(kills):
            instant = rng.uniform(self.ends[0][0], self.ends[-1][0])
            done = max(step for end, step in self.ends if end <= instant)
            lost.append(done - max((step for at, step in self.commits if at <= instant), default=0))
        return statistics.fmean(lost)


def figures(run: Run, ideal_step: float, arguments: argparse.Namespace) -> dict[str, Any]:
    lost = run.steps_lost(arguments.kills)
    failures = run.wall_seconds / (60 * arguments.mtbf_minutes)
    useful = ideal_step * (len(run.ends) - 1)
    lost_seconds = lost * run.wall_seconds / (len(run.ends) - 1) + run.start_up_seconds
    deciles = statistics.quantiles(run.intervals, n=10) if len(run.intervals) > 1 else None
    return {
        "step_seconds": statistics.median(s for step, s in run.seconds.items() if step > WARM_UP),
        "mean_step_seconds": run.wall_seconds / (len(run.ends) - 1),
        "saves": len(run.commits),
        "interval_p50": statistics.median(run.intervals) if run.intervals else None,
        "interval_p90": deciles[8] if deciles else None,
        "steps_lost": lost,
        "goodput": useful / (run.wall_seconds + failures * lost_seconds),
        "start_up_seconds": run.start_up_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.yml")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--mtbf-minutes", type=float, default=10)
    parser.add_argument("--directory", type=Path, help="where the runs write; a new folder in it, removed again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    arguments, arguments.overrides = parser.parse_known_args()

    results: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for _ in range(arguments.rounds):
        runs = {}
        for mode in MODES:
            directory = Path(tempfile.mkdtemp(dir=arguments.directory))
            runs[mode] = Run(mode, arguments, directory)
            shutil.rmtree(directory)
        ideal = figures(runs["no saves"], 0, arguments)["step_seconds"]
        for mode, run in runs.items():
            results[mode].append(figures(run, ideal, arguments))

    medians: dict[str, dict[str, Any]] = {
        mode: {
            name: None if rounds[0][name] is None else statistics.median(figures[name] for figures in rounds)
            for name in rounds[0]
        }
        for mode, rounds in results.items()
    }
    quiet = medians["no saves"]
    print(f"{arguments.steps} steps, {arguments.rounds} rounds, a failure every {arguments.mtbf_minutes:g} minutes")
    print(f"{'':18}{'median step':>12}{'mean step':>20}{'saves':>7}{'P50':>7}{'P90':>7}{'lost':>8}{'goodput':>9}")
    for mode, row in medians.items():
        slower = f"({row['mean_step_seconds'] / quiet['mean_step_seconds'] - 1:+.1%})"
        p50, p90 = ("-" if row[name] is None else f"{row[name]:.0f}" for name in ("interval_p50", "interval_p90"))
        print(
            f"{mode:18}{row['step_seconds']:10.3f} s{row['mean_step_seconds']:10.3f} s {slower}"
            f"{row['saves']:7.0f}{p50:>7}{p90:>7}{row['steps_lost']:8.1f}{row['goodput']:9.1%}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"medians": medians, "rounds": results}, indent=1))


if __name__ == "__main__":
    main()
