"""A run's log: a line, a `metrics.jsonl` object and TensorBoard scalars for every logged step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from maxlite.config import TelemetryConfig
from maxlite.telemetry.console import Console, step_line
from maxlite.telemetry.metrics_file import MetricsFile
from maxlite.telemetry.tensorboard import TensorBoard
from maxlite.telemetry.timer import FinishedStep


@dataclass(frozen=True)
class StepCost:
    """What one step processes, to turn seconds into rates."""

    tokens: int  # of the global batch
    flops_per_device: float  # model FLOPs
    peak_tflops: float | None  # of one device; None: not known


class RunLog:
    """Context manager. Writing never stops training: a failed write is said once, and the run goes on.

    Without a directory, for all processes of a run but one, it writes no files.
    """

    def __init__(
        self,
        directory: Path | None,
        config: TelemetryConfig,
        console: Console,
        cost: StepCost,
        resumed_step: int,
        last_step: int,
        work_at_risk_seconds: Callable[[], float],
    ) -> None:
        self._config = config
        self._console = console
        self._cost = cost
        self._last_step = last_step
        self._work_at_risk_seconds = work_at_risk_seconds
        self._seconds: list[float] = []
        self._since_log: tuple[int, float] | None = None  # (step, ready_at) of the newest logged step
        self._last: Mapping[str, Any] = {}  # the newest record, as last written
        self._failed: set[str] = set()
        self._open = ExitStack()
        self._file: MetricsFile | None = None
        self._board: TensorBoard | None = None
        if directory is not None:
            with self._unless_it_fails("metrics.jsonl"):
                self._file = self._open.enter_context(MetricsFile(directory / "metrics.jsonl", resumed_step))
                self._last = self._file.last
            if config.enable_tensorboard:
                with self._unless_it_fails("tensorboard"):
                    self._board = self._open.enter_context(TensorBoard(directory / "tensorboard"))
        console.start(resumed_step, last_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def finished(self, done: FinishedStep) -> bool:
        """Takes a step whose result is ready; logs it if it is due, or not finite; whether it did."""
        self._seconds.append(done.seconds)
        self._console.progress(done.step)
        if not self._is_logged(done):
            return False
        record = self._record(done)
        self._write(record)
        if not done.metrics["finite"]:
            self._console.line(f"step {done.step}: the loss or its gradient is not finite; update refused")
        left = (self._last_step - done.step) * statistics.median(self._seconds[-100:])
        self._console.line(step_line(record, self._last_step, None if self._console.shows_bar else left))
        return True

    def evaluated(self, step: int, loss: float) -> None:
        """Adds a held-out loss to the line of `step`."""
        self._write({"step": step, "eval_loss": loss})
        self._console.line(f"step {step}/{self._last_step}  held-out loss {loss:.4f}")

    def evaluation_of(self, step: int) -> float | None:
        """The held-out loss at `step`, if it is the last thing logged."""
        return self._last.get("eval_loss") if self._last.get("step") == step else None

    @property
    def last_loss(self) -> tuple[int, float] | None:
        """The last logged step and the training loss of its batch, in nats; None if there is no such number."""
        loss = self._last.get("loss")
        return None if loss is None else (self._last["step"], loss)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of a step over the median step's seconds, of this process; None before its first step."""
        return self._cost.tokens / statistics.median(self._seconds) if self._seconds else None

    def _is_logged(self, done: FinishedStep) -> bool:
        """By the step alone (or its failure), so that a run that was cut logs the steps that an uncut one does."""
        return (
            done.step % self._config.log_period == 0
            or done.step in (1, self._last_step)
            or self._config.evaluation_due(done.step, self._last_step)
            or not done.metrics["finite"]
        )

    def _record(self, done: FinishedStep) -> dict[str, Any]:
        step, ready_at = self._since_log or (done.step - 1, done.ready_at - done.seconds)
        self._since_log = (done.step, done.ready_at)
        tflops = self._cost.flops_per_device / done.seconds / 1e12
        record: dict[str, Any] = {
            "step": done.step,
            **{name: done.metrics[name] for name in ("loss", "learning_rate", "grad_norm")},
            "step_seconds": done.seconds,
            # Over all the time since the line before: saves, evaluations and waits for data count.
            "tokens_per_second": self._cost.tokens * (done.step - step) / (done.ready_at - ready_at),
            "tflops_per_device": tflops,
            "work_at_risk_seconds": self._work_at_risk_seconds(),
        }
        if self._cost.peak_tflops is not None:
            record["peak_share"] = tflops / self._cost.peak_tflops
        return record

    def _write(self, record: Mapping[str, Any]) -> None:
        """Writes a record; one for the same step as the last adds to it."""
        adds = self._last.get("step") == record["step"]
        self._last = {**self._last, **record} if adds else record
        if self._file is not None:
            with self._unless_it_fails("metrics.jsonl"):
                if adds:
                    self._file.extend_last({name: value for name, value in record.items() if name != "step"})
                else:
                    self._file.append(record)
        if self._board is not None:
            with self._unless_it_fails("tensorboard"):
                self._board.write(record)

    @contextmanager
    def _unless_it_fails(self, name: str) -> Generator[None]:
        """A writer whose disk is full or gone: said once, and training goes on."""
        try:
            yield
        except OSError as error:
            if name not in self._failed:
                self._console.line(f"{name} cannot be written ({error.strerror}); training goes on without it")
            self._failed.add(name)
