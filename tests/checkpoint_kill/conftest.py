"""Lives of one training run, each ended by a signal at an instant of the test's choice, seen from outside only:
what was printed, and what is in the checkpoint directory once the process is dead and nothing moves any more."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from maxlite.telemetry.metrics_file import read_metrics

PATIENCE_SECONDS = 300
FOREVER = 10**8  # steps; a life ends by its signal
EVAL_INTERVAL = 50

# Nothing here depends on `steps`, so that a run can be told its last step after its last kill.
ARGUMENTS = [
    "base_mlp_dim=2048",  # 5 MB of state, so that a save takes longer than a look at the directory
    "enable_continuous_checkpointing=true",
    "max_num_checkpoints_to_keep=3",
    "lr_schedule_type=constant",
    "learning_rate_schedule_steps=1000",
    f"eval_interval={EVAL_INTERVAL}",
]


@dataclass(frozen=True)
class Moment:
    """What can be seen of a living process."""

    seconds: float  # since its start
    newest: int  # step on storage; 0: none
    saving: bool  # a save has begun and is not committed


@dataclass(frozen=True)
class Life:
    """One process of a run, from its start to its death, and what it left."""

    status: int
    output: str
    printed_before: str  # of the output, before the signal
    newest: int  # step on storage; 0: none
    saving: bool  # it died with a save being written

    @property
    def began_at(self) -> int | None:
        """The step that it says it began at; None if it died before it could say."""
        match = re.search(r"^(?:resuming from|starting at) step (\d+)\b", self.output, re.MULTILINE)
        return int(match[1]) if match else None

    @property
    def last_logged(self) -> int:
        return max((int(step) for step in re.findall(r"^step (\d+)/\d+  loss ", self.output, re.MULTILINE)), default=0)

    @property
    def was_compiling(self) -> bool:
        """Whether the signal came between the announcement of the compiling and the first logged step."""
        return self.printed_before.rstrip().endswith("compiling the train step")

    @property
    def cut_evaluation(self) -> bool:
        """Whether it saved a step with an evaluation due and left without the evaluation."""
        evaluated = re.search(rf"^step {self.newest}/\d+  held-out", self.output, re.MULTILINE)
        return self.newest == self.last_logged > 0 and self.newest % EVAL_INTERVAL == 0 and not evaluated


class Mortal:
    """A run whose processes are started, watched and ended by the test."""

    def __init__(self, run):
        self.run = run
        self.log = run.folder / "log.txt"
        self.checkpoints = run.directory / "checkpoints"
        self.newest = 0  # step on storage when the last life ended
        self.first_commit_seconds = 3.0  # what a life last took to commit something; at first a guess

    def live(self, number: int, ready: Callable[[Moment], bool], *arguments: str) -> Life:
        """Starts a process, sends it signal `number` as soon as `ready` holds, and looks at what it left.

        Whatever the signal: a life begins at the newest step that was committed when the one before it died,
        no committed step goes without a newer one, and what has the name of a step is whole.
        """
        before, committed, began = self.newest, False, time.monotonic()
        process = self._start(FOREVER, *arguments)
        try:
            while True:
                seconds = time.monotonic() - began
                newest, saving = self._look()
                if newest > before and not committed:
                    committed, self.first_commit_seconds = True, seconds
                if ready(Moment(seconds, newest, saving)):
                    break
                assert process.poll() is None, f"ended before its signal: {self.printed()}"
                assert seconds < PATIENCE_SECONDS, self.printed()
                time.sleep(0.0005)
            process.send_signal(number)
            printed_before = self.printed()
            status = process.wait(timeout=PATIENCE_SECONDS)
        finally:
            process.kill()
            process.wait()
        life = Life(status, self.printed(), printed_before, *self._look())
        assert life.began_at in (None, before), f"step {before} was committed, and then:\n{life.output}"
        assert life.newest >= newest >= before, f"committed steps are gone: {before}, {newest}, {life}"
        for step in self._steps():
            assert (self.checkpoints / str(step) / "commit_success.txt").exists(), f"step {step} is torn"
        self.newest = life.newest
        return life

    def finish(self, last: int) -> str:
        """Trains to step `last` without a signal; what was printed."""
        process = self._start(last)
        try:
            assert process.wait(timeout=PATIENCE_SECONDS) == 0, self.printed()
        finally:
            process.kill()
        return self.printed()

    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    def state(self, step: int) -> dict[str, bytes]:
        """Every array of a checkpoint as bytes, read by plain Orbax and not by what is tested."""
        path = epath.Path(self.checkpoints / str(step) / "state")
        handler = ocp.PyTreeCheckpointHandler()
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(path).tree)
        restored = handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=arguments))
        leaves = jax.tree_util.tree_leaves_with_path(restored)
        return {jax.tree_util.keystr(name): np.asarray(array).tobytes() for name, array in leaves}

    def losses(self) -> list[dict]:
        keys = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
        return [
            {key: record.get(key) for key in keys} for record in read_metrics(self.run.directory / "metrics.jsonl")
        ]

    def _start(self, steps: int, *arguments: str) -> subprocess.Popen:
        command = [
            sys.executable,
            "-m",
            "maxlite.train",
            *self.run.arguments,
            *ARGUMENTS,
            f"steps={steps}",
            *arguments,
        ]
        with self.log.open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def _names(self) -> list[str]:
        return [path.name for path in self.checkpoints.iterdir()] if self.checkpoints.is_dir() else []

    def _steps(self) -> list[int]:
        return [int(name) for name in self._names() if name.isdigit()]

    def _look(self) -> tuple[int, bool]:
        """The newest step, and whether a save is being written; one look, so that it is quick."""
        names = self._names()
        newest = max((int(name) for name in names if name.isdigit()), default=0)
        return newest, any(".orbax-checkpoint-tmp" in name for name in names)


@pytest.fixture
def mortal(make_run):
    """`mortal("a")` is a fresh run to be ended over and over."""
    return lambda name: Mortal(make_run(name))
