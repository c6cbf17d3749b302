"""Trains a model: `python -m maxlite.train config.yml key=value ...`."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from maxlite.signals import StopRequest

if TYPE_CHECKING:
    from maxlite.config import Config
    from maxlite.parallel import Processes

USAGE = "usage: python -m maxlite.train [config.yml] [key=value ...] [--print_config] [--help]"


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    with StopRequest() as stop:
        # Imported under the handlers, so that a signal during the imports is answered too.
        from maxlite.config import Config, read_command

        try:
            config = read_command(Config, arguments, USAGE).config
            from maxlite.parallel import Processes  # now, so that a bad config is answered before jax is loaded

            with Processes(config.parallel, report) as processes:
                return train(config, processes, stop, arguments)
        except Exception as error:
            return report(error)


def report(error: BaseException, process: str = "") -> int:
    """Says on standard error what ended the run, of which process if there are several; returns the exit status."""
    from maxlite.config import Exit, InputError

    status = Exit.BAD_INPUT
    if not isinstance(error, InputError):
        from maxlite.checkpoint import CheckpointError
        from maxlite.parallel import ProcessLost

        status = Exit.SAVE_FAILED
        if not isinstance(error, (CheckpointError, ProcessLost)):
            traceback.print_exception(error)
            return 1
    for line in str(error).splitlines():
        print(f"{process}error: {line}", file=sys.stderr)
    return status


def train(config: Config, processes: Processes, stop: StopRequest, arguments: Sequence[str]) -> int:
    """One run, from a valid config to its last committed state; returns the exit status.

    Every process decides the same at the same step: by the step, by its metrics, which are the same everywhere, and
    by what the processes agreed on in the newest finished step.

    Args:
        config: the config.
        processes: the processes that train together; the primary writes and prints for all.
        stop: turns true when a signal asks for the end.
        arguments: what was typed, to be shown as the way to resume.

    Raises:
        InputError: data, devices, run directory or checkpoint do not fit the config.
        CheckpointError: the state could not be restored, or not saved at the end.
    """
    # Imported here, as jax is.
    from maxlite.checkpoint import Checkpointer
    from maxlite.config import Exit, RunDirectory
    from maxlite.program import build_program, open_data, require_same_data, run_metadata
    from maxlite.telemetry.console import Console
    from maxlite.telemetry.run_log import RunLog
    from maxlite.telemetry.summary import summary
    from maxlite.telemetry.timer import FinishedStep, StepTimer
    from maxlite.training import FiniteGuard, NonFiniteError

    last, save_last = config.run.steps, config.checkpoint.save_checkpoint_on_completion
    with ExitStack() as stack:
        if processes.count > 1:  # a signal to one ends all, in the first step that they compute together
            stack.enter_context(stop.deferred())
        console = stack.enter_context(Console(silent=not processes.primary))
        run = stack.enter_context(RunDirectory(config, processes.primary))
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
            if processes.primary:
                console.lines(program.describe(), data.describe(), run.begin(start))
            batches = stack.enter_context(data.train_batches(start))
            timer = stack.enter_context(StepTimer())
            at_risk = checkpointer.work_at_risk_seconds
            log_directory = run.path if processes.primary else None
            log = stack.enter_context(
                RunLog(log_directory, config.telemetry, console, program.cost, start, last, at_risk)
            )
            guard = FiniteGuard(config.optimizer)
            evaluated = start if processes.same(log.evaluation_of(start) is not None) else None  # the newest such step
            newest: Mapping[str, float] = {}  # metrics of the newest finished step

            def flags() -> dict[str, bool]:
                return {"stop": bool(stop.requested)}

            def agreed(name: str) -> bool:
                return program.agreement.agreed(flags(), newest)[name]

            def evaluation_wanted(step: int) -> bool:
                return data.num_eval_batches > 0 and config.telemetry.evaluation_due(step, last)

            def settle(finished: FinishedStep | None) -> None:
                nonlocal newest
                if finished is not None:
                    newest = finished.metrics
                    log.finished(finished)
                    guard.check(finished.step, finished.metrics)

            step = start
            if step < last:
                console.line("compiling the train step")
            checkpointer.maybe_save(step, state)
            while not agreed("stop"):
                if evaluation_wanted(step) and evaluated != step:
                    loss = program.evaluate(state, data.eval_batches(config.telemetry.eval_steps), flags)
                    if loss is None:  # agreed to stop meanwhile
                        break
                    log.evaluated(step, loss)
                    evaluated = step
                if step >= last:
                    break
                step += 1
                votes = flags() | checkpointer.flags(step)
                inputs = program.to_device(next(batches)), program.agreement.to_device(votes)
                state, finished = timer.run(step, program.train_step, state, *inputs)
                settle(finished)
                due = checkpointer.due(step, program.agreement.agreed(votes, newest))
                saving = due or (step == last and save_last)
                if saving or evaluation_wanted(step):
                    settle(timer.drain())  # a state may be saved once its step is known to be finite
                if saving:
                    checkpointer.save(step, state)
            settle(timer.drain())
            if step > start and (step < last or save_last):
                checkpointer.save_final(step, state)
        except NonFiniteError as error:
            console.line(f"error: {error}")
            return Exit.DIVERGED
        done = step >= last and (not evaluation_wanted(step) or evaluated == step)
        resume = resume_command(arguments, None if step < last or not done else 2 * last)
        console.lines(summary(step, last, log, checkpointer.stats, run.path, resume))
        saved = step == start or checkpointer.stats.last_committed_step == step
        if stop.requested or not done:
            by = stop.requested or "a signal to another process"
            console.line(f"{by}: step {step} is {'saved' if saved else 'not saved'}")
    return Exit.DONE if done else Exit.PREEMPTED if saved else Exit.SAVE_FAILED


def resume_command(arguments: Sequence[str], steps: int | None) -> str:
    """The command that was typed, its environment settings included; for another number of steps, where given."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in os.environ.items() if name.startswith("M_")]
    if steps is not None:
        arguments = [*(argument for argument in arguments if not argument.startswith("steps=")), f"steps={steps}"]
    return " ".join([*settings, "python -m maxlite.train", shlex.join(arguments)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
