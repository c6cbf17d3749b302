"""Trains a model: `python -m maxlite.train config.yml key=value ...`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from maxlite.signals import StopRequest

if TYPE_CHECKING:
    from maxlite.config import Config

USAGE = "usage: python -m maxlite.train [config.yml] [key=value ...] [--print_config] [--help]"


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    with StopRequest() as stop:
        # Imported under the handlers, so that a signal during the imports is answered too.
        from maxlite.config import Config, Exit, InputError, read_command, report_input_error

        try:
            return train(read_command(Config, arguments, USAGE).config, stop, arguments)
        except InputError as error:
            report_input_error(error)
            return Exit.BAD_INPUT


def train(config: Config, stop: StopRequest, arguments: Sequence[str]) -> int:
    """One run, from a valid config to its last committed state; returns the exit status.

    Args:
        config: the config.
        stop: turns true when a signal asks for the end.
        arguments: what was typed, to be shown as the way to resume.

    Raises:
        InputError: data, devices, run directory or checkpoint do not fit the config.
    """
    # Imported here, so that a bad config is answered before jax is loaded.
    from maxlite.checkpoint import Checkpointer, CheckpointError
    from maxlite.config import Exit, RunDirectory
    from maxlite.program import build_program, open_data, require_same_data, run_metadata
    from maxlite.telemetry.console import Console
    from maxlite.telemetry.run_log import RunLog
    from maxlite.telemetry.summary import summary
    from maxlite.telemetry.timer import FinishedStep, StepTimer
    from maxlite.training import FiniteGuard, NonFiniteError

    last, save_last = config.run.steps, config.checkpoint.save_checkpoint_on_completion
    with ExitStack() as stack:
        console = stack.enter_context(Console())
        run = stack.enter_context(RunDirectory(config))
        try:
            program = build_program(config)
            data = stack.enter_context(open_data(program))
            metadata = run_metadata(program, data)
            stack.enter_context(stop.deferred())
            checkpointer = stack.enter_context(
                Checkpointer(run.path / "checkpoints", config.checkpoint, metadata=metadata, report=console.line)
            )
            state, start = checkpointer.restore_or_init(program.abstract_state, program.init_state)
            require_same_data(checkpointer.saved_metadata, metadata)
            console.lines(program.describe(), data.describe(), run.begin(start))
            batches = stack.enter_context(data.train_batches(start))
            timer = stack.enter_context(StepTimer())
            at_risk = checkpointer.work_at_risk_seconds
            log = stack.enter_context(RunLog(run.path, config.telemetry, console, program.cost, start, last, at_risk))
            guard = FiniteGuard(config.optimizer)

            def evaluation_wanted(step: int) -> bool:
                return data.num_eval_batches > 0 and config.telemetry.evaluation_due(step, last)

            def settle(finished: FinishedStep | None) -> None:
                if finished is not None:
                    log.finished(finished)
                    guard.check(finished.step, finished.metrics)

            step = start
            if step < last:
                console.line("compiling the train step")
            checkpointer.maybe_save(step, state)
            while not stop.requested:
                if evaluation_wanted(step) and log.evaluation_of(step) is None:
                    log.evaluated(step, program.evaluate(state, data.eval_batches(config.telemetry.eval_steps), stop))
                if step >= last or stop.requested:
                    break
                step += 1
                state, finished = timer.run(step, program.train_step, state, program.to_device(next(batches)))
                settle(finished)
                saving = checkpointer.due(step) or (step == last and save_last)
                if saving or evaluation_wanted(step):
                    settle(timer.drain())  # a state may be saved once its step is known to be finite
                if saving:
                    checkpointer.save(step, state)
            settle(timer.drain())
            if step > start and (step < last or save_last):
                checkpointer.save_final(step, state)
        except CheckpointError as error:
            console.line(f"error: {error}")
            return Exit.SAVE_FAILED
        except NonFiniteError as error:
            console.line(f"error: {error}")
            return Exit.DIVERGED
        done = step >= last and (not evaluation_wanted(step) or log.evaluation_of(step) is not None)
        resume = resume_command(arguments, None if step < last or not done else 2 * last)
        console.lines(summary(step, last, log, checkpointer.stats, run.path, resume))
        saved = step == start or checkpointer.stats.last_committed_step == step
        if stop.requested:
            console.line(f"{stop.requested}: step {step} is {'saved' if saved else 'not saved'}")
    return Exit.DONE if done else Exit.PREEMPTED if saved else Exit.SAVE_FAILED


def resume_command(arguments: Sequence[str], steps: int | None) -> str:
    """The command that was typed, its environment settings included; for another number of steps, where given."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in os.environ.items() if name.startswith("M_")]
    if steps is not None:
        arguments = [*(argument for argument in arguments if not argument.startswith("steps=")), f"steps={steps}"]
    return " ".join([*settings, "python -m maxlite.train", shlex.join(arguments)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
