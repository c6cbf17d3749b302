"""Trains a model: `python -m maxlite.train config.yml key=value ...`."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
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
                status = train(config, processes, stop, arguments)
        except Exception as error:
            status = report(error)
        return stop.leave(status)


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
    from maxlite.checkpoint import Checkpointer, Peers
    from maxlite.config import Exit, RunDirectory
    from maxlite.program import build_program, open_data, run_metadata
    from maxlite.resume import config_changes, require_same_run
    from maxlite.telemetry.console import Console
    from maxlite.telemetry.events import EventsFile
    from maxlite.telemetry.run_log import RunLog
    from maxlite.telemetry.summary import summary
    from maxlite.telemetry.timer import FinishedStep, StepTimer
    from maxlite.training import FiniteGuard, NonFiniteError

    last, saves = config.run.steps, config.checkpoint
    with ExitStack() as stack:
        if processes.count > 1:  # a signal to one ends all, in the first step that they compute together
            stop.defer()
        console = stack.enter_context(Console(silent=not processes.primary))
        run = stack.enter_context(RunDirectory(config, processes.primary))
        console.lines(saves.warnings(last))
        program = build_program(config)
        data = stack.enter_context(open_data(program))
        metadata = run_metadata(program, data)
        events = stack.enter_context(
            EventsFile(run.path / "events.jsonl" if processes.primary else None, console.line)
        )
        checkpointer = Checkpointer(
            run.path / "checkpoints",
            saves,
            metadata=metadata,
            peers=Peers.of_this_run(),
            report=console.line,
            record=events.record,
        )
        admit = partial(require_same_run, now=metadata, allow_config_change=saves.allow_config_change)
        state, start = checkpointer.restore_or_init(program.abstract_state, program.init_state, admit)
        stop.defer()
        stack.enter_context(checkpointer)
        console.lines(program.describe(), processes.describe(), data.describe())
        if saved := checkpointer.saved_metadata:
            console.lines(admit(saved))
            if changes := config_changes(saved, metadata):
                events.record("config_changed", step=start, changes=[change._asdict() for change in changes])
        if processes.primary:
            console.lines(run.begin(start, checkpointer.resumed_step is not None))
        batches = stack.enter_context(data.train_batches(start))
        timer = stack.enter_context(StepTimer())
        at_risk = checkpointer.work_at_risk_seconds
        log_directory = run.path if processes.primary else None
        log = stack.enter_context(RunLog(log_directory, config.telemetry, console, program.cost, start, last, at_risk))
        guard = FiniteGuard(config.optimizer)
        evaluated = start if processes.same(log.evaluation_of(start) is not None) else None  # the newest such step
        newest: Mapping[str, float] = {}  # metrics of the newest finished step
        newest_step = start

        def flags() -> dict[str, bool]:
            return {"stop": bool(stop.requested)}

        def stopping() -> bool:
            return program.agreement.agreed(flags(), newest)["stop"]

        def evaluation_wanted(step: int) -> bool:
            return data.num_eval_batches > 0 and config.telemetry.evaluation_due(step, last)

        def settle(finished: FinishedStep | None) -> None:
            nonlocal newest, newest_step
            if finished is not None:
                newest, newest_step = finished.metrics, finished.step
                if log.finished(finished):
                    console.lines(checkpointer.news() + run.check())
                checkpointer.observe_step(finished.seconds)
                guard.check(finished.step, finished.metrics)

        step, metrics = start, {}
        try:
            # No step has carried votes yet; the primary's clock and the step decide, so its answer is everybody's.
            if processes.same(checkpointer.due(step, checkpointer.flags(step))):
                checkpointer.save(step, state)
            if step < last:
                console.line("compiling the train step")
            # A compilation cannot be interrupted; alone, this process need not see its end.
            ready = stop.finishes(program.compile, wait=processes.count > 1)
            while ready and not stopping():
                if evaluation_wanted(step) and evaluated != step:
                    loss = program.evaluate(state, data.eval_batches(config.telemetry.eval_steps), flags)
                    if loss is None:  # agreed to stop meanwhile
                        break
                    log.evaluated(step, loss)
                    evaluated = step
                    if saves.keep_best_n_checkpoints:
                        checkpointer.save(step, state, metrics | {"eval_loss": loss})
                if step >= last:
                    break
                step += 1
                votes = flags() | checkpointer.flags(step)
                inputs = program.to_device(next(batches)), program.agreement.to_device(votes)
                state, finished = timer.run(step, program.train_step, state, *inputs)
                settle(finished)
                cast_for = step if processes.count == 1 else newest_step
                due = checkpointer.due(step, program.agreement.agreed(votes, newest), cast_for)
                saving = due or (step == last and saves.save_checkpoint_on_completion)
                if saving or evaluation_wanted(step):
                    settle(timer.drain())  # a state may be saved once its step is known to be finite
                    metrics = {"loss": newest["loss"]}
                    # What is to be kept by its held-out loss is saved with it.
                    saving = saving and not (evaluation_wanted(step) and saves.keep_best_n_checkpoints)
                if saving:
                    checkpointer.save(step, state, metrics)
            settle(timer.drain())
        except NonFiniteError as error:
            console.line(f"error: {error}")
            return Exit.DIVERGED
        done, grace = (
            step >= last and (not evaluation_wanted(step) or evaluated == step),
            saves.preemption_grace_seconds,
        )
        safe: int | None = start
        by = stop.requested or "a signal to another process"
        if not done and step > start:
            left, metrics = stop.seconds_left(grace), {"loss": newest["loss"]}
            console.line(f"{by}: saving within {left:.0f} s, what is left of preemption_grace_seconds={grace:g}")
            safe = checkpointer.save_preempted(step, state, left, metrics)
        elif not done:
            checkpointer.wait(stop.seconds_left(grace))
        elif step != checkpointer.resumed_step and saves.save_checkpoint_on_completion:
            checkpointer.save_final(step, state, metrics)
        else:
            checkpointer.require_saved()
        resume = resume_command(arguments, 2 * last if done else None)
        console.lines(summary(step, last, log, checkpointer.stats, run.path, resume))
        if not done:
            console.line(f"{by}: {stopped(step, start, safe)}")
        return Exit.DONE if done else Exit.SAVE_FAILED if safe is None else Exit.PREEMPTED


def stopped(step: int, start: int, safe: int | None) -> str:
    """What a signal left of a run that began at `start` and came to `step`; `safe` is on storage."""
    if step == start:
        return "stopped before its first step: nothing to save, nothing lost"
    if safe is None:
        return f"step {step} is not saved"
    return f"step {safe} is saved" + (f"; the {step - safe} steps after it will be done again" if safe < step else "")


def resume_command(arguments: Sequence[str], steps: int | None) -> str:
    """The command that was typed, its environment settings included; for another number of steps, where given."""
    command = os.environ.get("MAXLITE_STARTED_AS", "python -m maxlite.train")  # set by maxlite.launch
    settings = [f"{name}={shlex.quote(value)}" for name, value in os.environ.items() if name.startswith("M_")]
    if steps is not None:
        arguments = [*(argument for argument in arguments if not argument.startswith("steps=")), f"steps={steps}"]
    return " ".join([*settings, command, shlex.join(arguments)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
