"""Trains a model: `python -m maxlite.train config.yml key=value ...`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from maxlite.config import Config, Exit, InputError, RunDirectory, read_command, report_input_error
from maxlite.signals import StopRequest

COMMAND = "python -m maxlite.train"
USAGE = f"usage: {COMMAND} [config.yml] [key=value ...] [--print_config] [--help]"


def main(arguments: Sequence[str]) -> Exit:
    """Runs the command; returns its exit status."""
    with StopRequest() as stop:
        try:
            config = read_command(Config, arguments, USAGE).config
            return train(config, stop, f"{COMMAND} {shlex.join(arguments)}")
        except InputError as error:
            report_input_error(error)
            return Exit.BAD_INPUT
        except KeyboardInterrupt as signal:
            print(f"\n{signal}: stopped before the first step: nothing to save, nothing lost", file=sys.stderr)
            return Exit.PREEMPTED


def train(config: Config, stop: StopRequest, command: str) -> Exit:
    """One run, from a valid config to its last committed state.

    Args:
        config: the config.
        stop: turns true when a signal asks for the end.
        command: what was typed, shown as the way to resume.

    Raises:
        InputError: data, devices, run directory or checkpoint do not fit the config.
    """
    # Imported here, so that a bad config is answered before jax is loaded.
    from maxlite.checkpoint import Checkpointer, CheckpointError
    from maxlite.program import build_program, open_data, require_same_data, run_metadata
    from maxlite.telemetry.console import Console
    from maxlite.telemetry.run_log import RunLog
    from maxlite.telemetry.summary import summary
    from maxlite.telemetry.timer import FinishedStep, StepTimer
    from maxlite.training import NonFiniteError, require_finite

    last, save_last = config.run.steps, config.checkpoint.save_checkpoint_on_completion
    evaluation_due = config.telemetry.evaluation_due
    with ExitStack() as stack:
        console = stack.enter_context(Console())
        run = stack.enter_context(RunDirectory(config))
        try:
            program = build_program(config)
            data = stack.enter_context(open_data(program))
            metadata = run_metadata(program, data)
            checkpointer = stack.enter_context(
                Checkpointer(run.path / "checkpoints", config.checkpoint, metadata=metadata, report=console.line)
            )
            state, step = checkpointer.restore_or_init(program.abstract_state, program.init_state)
            require_same_data(checkpointer.saved_metadata, metadata)
            console.lines(program.describe(), data.describe(), run.begin(step))
            batches = stack.enter_context(data.train_batches(step))
            timer = StepTimer()
            log = stack.enter_context(
                RunLog(
                    run.path, config.telemetry, console, program.cost, step, last, checkpointer.work_at_risk_seconds
                )
            )

            def settle(finished: FinishedStep | None) -> None:
                if finished is not None:
                    log.finished(finished)
                    require_finite(finished.step, finished.metrics, config.optimizer)

            stack.enter_context(stop.deferred())
            checkpointer.maybe_save(step, state)
            while not stop.requested:
                if data.num_eval_batches and evaluation_due(step, last) and log.evaluation_of(step) is None:
                    log.evaluated(step, program.evaluate(state, data.eval_batches(config.telemetry.eval_steps), stop))
                if step >= last or stop.requested:
                    break
                step += 1
                state, finished = timer.run(step, program.train_step, state, program.to_device(next(batches)))
                settle(finished)
                saving = checkpointer.due(step) or (step == last and save_last)
                if saving or evaluation_due(step, last):
                    settle(timer.drain())  # a state may be saved once its step is known to be finite
                if saving:
                    checkpointer.save(step, state)
            settle(timer.drain())
            if step < last or save_last:
                checkpointer.save_final(step, state)
        except CheckpointError as error:
            console.line(f"error: {error}")
            return Exit.SAVE_FAILED
        except NonFiniteError as error:
            console.line(f"error: {error}")
            return Exit.DIVERGED
        console.lines(summary(step, last, log, checkpointer.stats, run.path, command))
    return Exit.DONE if step >= last else Exit.PREEMPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
