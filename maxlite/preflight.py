"""Checks before a run that it can run: `python -m maxlite.preflight config.yml key=value ...`.

Every process of the run is started with it as it would be with maxlite.train, by the same launcher.
"""

from __future__ import annotations

import json
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxlite import train
from maxlite.config import Config, Exit, InputError, RunDirectory, read_command

if TYPE_CHECKING:
    from maxlite.checkpoint import Peers
    from maxlite.parallel import Processes
    from maxlite.program import Program
    from maxlite.readiness import Check, Clock, Finding

USAGE = "usage: python -m maxlite.preflight [config.yml] [key=value ...] [--json] [--print_config] [--help]"
PACKAGES = ("maxlite", "jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "flax", "optax", "orbax-checkpoint", "grain")
MOST_BYTES = 1_000_000_000  # written by each process to measure the storage, if its part of the state is larger
# Keys that may differ: the process's own number, and paths, which are judged by what is there.
OWN = {"process_id", "base_output_directory", "text_files", "eval_text_files", "tokenizer_path"}
OWN |= {"data_cache_directory", "jax_cache_dir"}
PEER_SECONDS = 24 * 3600.0  # for another process to tokenise its text; one that is lost is noticed by jax
TELL_SECONDS = 5.0  # between two lines about what takes long


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was written is removed then too
    try:
        config = read_command(Config, [word for word in arguments if word != "--json"], USAGE).config
        from maxlite.parallel import Processes  # now, so that a bad config is answered before jax is loaded

        with Processes(config.parallel, report) as processes:
            return preflight(config, processes, as_json="--json" in arguments)
    except (Exception, KeyboardInterrupt) as error:
        return report(error)
    finally:
        signal.signal(signal.SIGTERM, before)


def report(error: BaseException, process: str = "") -> int:
    """Says on standard error what ended the command, of which process if there are several; its exit status."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 1 if train.report(error, process) == 1 else Exit.BAD_INPUT  # no other failure is one of a run's here


def preflight(config: Config, processes: Processes, as_json: bool = False) -> Exit:
    """Checks what the run needs, on every process; the primary prints the page. Exit status 0, or 2 if one failed."""
    from maxlite import readiness
    from maxlite.checkpoint import Peers

    survey = Survey(Peers.of_this_run())
    everyone = survey.ask("about", lambda: _about(config))
    clocks = _clocks(survey)
    checks: list[Check | None] = [
        readiness.check_versions(everyone),
        readiness.check_config(everyone),
        readiness.check_clocks(clocks, everyone),
    ]
    measured: dict[str, Any] = {"clock_skew_seconds": [clock.skew for clock in clocks]}
    programs: list[Program] = []
    found = survey.ask("plan", lambda: _plan(config, processes, programs))
    failed = readiness.check_errors("devices", found)
    checks.append(failed or readiness.Check("devices", "ok", found[0]["plan"]))
    if failed:
        checks += [readiness.Check(name, "skipped", "no devices") for name in ("directory", "room", "speed", "data")]
    else:
        checks += _check_storage(config, programs[0], survey, measured)
        checks.append(readiness.check_data(survey.ask("data", lambda: _first_batch(programs[0]))))
    done = [check for check in checks if check is not None]
    good = not any(check.status == "FAIL" for check in done)
    # Process 0's word for all: its clock is the one that the others' are held against.
    ready = survey.ask("end", lambda: {"ready": good})[0]["ready"]
    if processes.primary:
        _show(done, ready, measured, as_json)
    return Exit.DONE if ready else Exit.BAD_INPUT


class Survey:
    """What every process finds."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._host = socket.gethostname()

    def ask(self, topic: str, look: Callable[[], Mapping[str, Any]]) -> list[Finding]:
        """Looks, and returns what every process found, by index: an `error` where it could not. All call it."""
        from maxlite.checkpoint.errors import in_words

        try:
            finding = look()
        except InputError as error:
            finding = {"error": str(error)}
        except OSError as error:
            finding = {"error": in_words(error)}
        return self.tell(topic, finding)

    def tell(self, topic: str, finding: Mapping[str, Any]) -> list[Finding]:
        """Gives what was found, and returns what every process did."""
        text = json.dumps({"host": self._host, **finding})
        texts = self.peers.exchange(f"preflight/{topic}", text, timeout_seconds=PEER_SECONDS)
        return [json.loads(text) for text in texts]


def _about(config: Config) -> Finding:
    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {
        "versions": {"python": platform.python_version()} | {name: installed(name) for name in PACKAGES},
        "config": {key: value for key, value in config.flat().items() if key not in OWN},
    }


def _clocks(survey: Survey) -> list[Clock]:
    """Every process's clock, held against this one's."""
    from maxlite.readiness import Clock

    survey.ask("together", dict)  # the next two take but a moment then
    before = time.time()
    survey.ask("now", dict)  # nobody is through before process 0 has begun it
    times = [finding["time"] for finding in survey.ask("time", lambda: {"time": time.time()})]
    after = time.time()
    return [Clock(before, there, after) for there in times]


def _plan(config: Config, processes: Processes, programs: list[Program]) -> Finding:
    from maxlite.program import build_program

    programs.append(build_program(config))
    return {"plan": "\n".join([*processes.describe(), programs[0].mesh_plan.describe()])}


def _first_batch(program: Program) -> Finding:
    from maxlite.program import open_data

    start = time.monotonic()
    with open_data(program) as data, data.train_batches(0) as batches:
        next(batches)
        seconds = time.monotonic() - start
        return {"fingerprint": data.fingerprint, "data": data.describe().splitlines()[0], "seconds": seconds}


def _check_storage(config: Config, program: Program, survey: Survey, measured: dict[str, Any]) -> list[Check]:
    """The directory of checkpoints, its speed and its room; adds what was measured."""
    from maxlite.checkpoint.layout import CHECKPOINTS
    from maxlite.checkpoint.trial import Room, look_for_room, scratch_directory
    from maxlite.readiness import Check, Speed, check_directory, check_errors, check_room, check_speed

    saves = config.checkpoint
    if not saves.enable_checkpointing:
        return [Check(name, "skipped", "enable_checkpointing=false") for name in ("directory", "room", "speed")]
    directory = RunDirectory(config).path.absolute() / CHECKPOINTS
    state_bytes = program.state_bytes
    size = min(MOST_BYTES, state_bytes // survey.peers.count)
    measured["state_bytes"] = state_bytes
    with scratch_directory(directory, survey.peers, survey.tell) as (path, found):
        checks = [check_directory(str(directory), found)]
        if checks[0].status == "FAIL":
            return checks + [Check(name, "skipped", "no directory") for name in ("room", "speed")]
        found = survey.ask("room", lambda: look_for_room(directory)._asdict())
        if failed := check_errors("room", found[:1]):
            return [*checks, failed, Check("speed", "skipped", "room not known")]
        room = Room(found[0]["free"], found[0]["own"])
        measured |= {"free_bytes": room.free, "own_bytes": room.own}
        checks.append(check_room(room, state_bytes, saves, config.run.steps))
        if room.free is not None and room.free < size * survey.peers.count:
            return [*checks, Check("speed", "skipped", "no room for what would be written")]
        found = _try_speed(path, size, survey)
    if failed := check_errors("speed", found, "look at what the storage reports"):
        return [*checks, failed]
    speed = Speed.of(found)
    measured |= speed.numbers(state_bytes)
    return [*checks, check_speed(speed, state_bytes, saves)]


def _try_speed(directory: Path, size: int, survey: Survey) -> list[Finding]:
    """Every process writes `size` bytes at the same time, then reads them back."""
    from maxlite.checkpoint.probe import ScratchFiles
    from maxlite.checkpoint.stats import in_bytes

    told = 0.0

    def progress(what: str, done: int, seconds: float) -> None:
        nonlocal told
        if survey.peers.primary and seconds > told + TELL_SECONDS:
            told = seconds
            line = f"{what} {in_bytes(size)} in {directory.parent}: {in_bytes(done)} in {seconds:.0f} s"
            print(line, file=sys.stderr, flush=True)

    with ScratchFiles(directory, f"process-{survey.peers.index}", size, progress) as files:
        written = survey.ask("write", lambda: {"write": files.write()._asdict()})
        if any("error" in finding for finding in written):
            return written
        told = 0.0
        read = survey.ask("read", lambda: {"read": files.read()._asdict()})
    return [{**one, **other} for one, other in zip(written, read, strict=True)]


def _show(checks: Sequence[Check], ready: bool, measured: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"ready": ready, "checks": [check._asdict() for check in checks], "measured": measured}))
        return
    for check in checks:
        print("\n".join(check.lines()))
    failed = [check.name for check in checks if check.status == "FAIL"]
    print("ready" if ready else f"not ready: {', '.join(failed)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
