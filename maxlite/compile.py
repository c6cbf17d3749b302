"""Compiles the train step for TPUs that are not there: `python -m maxlite.compile config.yml key=value ...`.

Prints what the step needs of each device and whether it fits; exit 0 if it does, 2 if not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maxlite.config import Config, Exit, InputError, read_command, report_input_error
from maxlite.topology import Topology, parse_topology

if TYPE_CHECKING:
    from maxlite.compile_report import Report
    from maxlite.program import Program

USAGE = "usage: python -m maxlite.compile [config.yml] compile_topology=NAME [key=value ...] [--json] [--help]"

# Read by libtpu when jax loads it. Nothing of a TPU machine is asked for, and as no device is touched, other
# processes may compile at the same time.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def main(arguments: Sequence[str]) -> Exit:
    """Runs the command; returns its exit status."""
    own = [argument for argument in arguments if argument != "--json"]
    try:
        config = read_command(Config, own, USAGE).config
        topology = require_topology(config)
        os.environ.update(ENVIRONMENT)
        report = compile_report(config, topology)
        if not report.fits:
            report = replace(report, fix=find_fix(own, topology, config))
    except InputError as error:
        report_input_error(error)
        return Exit.BAD_INPUT
    print(json.dumps(report.as_json(), indent=2) if "--json" in arguments else report.text())
    return Exit.DONE if report.fits else Exit.BAD_INPUT


def require_topology(config: Config) -> Topology:
    """The slice to compile for; everything that can be wrong is said before the long compilation.

    Raises:
        InputError: none is named, or there is none of that name; the TPU compiler is not installed; the compiled step
            cannot be written where it should be.
    """
    name = config.compile.compile_topology
    if name is None:
        raise InputError("compile_topology needs a value, the TPU slice to compile for, such as v5p-128 or v6e-256")
    topology = parse_topology(name)
    written = config.compile.compiled_trainstep_file
    if written is not None and not Path(written).expanduser().parent.is_dir():
        raise InputError(f"compiled_trainstep_file={written}: there is no such directory")
    if importlib.util.find_spec("libtpu") is None:
        raise InputError('the TPU compiler is not installed; it comes with: pip install "maxlite[tpu]"')
    return topology


class Compiled(NamedTuple):
    """What the compiler made of a step.

    executable: None: the compiler refused it, as it needs more memory than there is.
    text: the compiled program, in HLO; '' where it was refused.
    refused_bytes: of temporaries on each device, where it was refused.
    seconds: the compilation took.
    """

    executable: Any
    text: str
    refused_bytes: int
    seconds: float


def compile_report(config: Config, topology: Topology) -> Report:
    """Compiles the train step of `config` and says what it needs.

    Raises:
        InputError: the config does not fit the devices' number.
    """
    from maxlite.compile_report import make_report
    from maxlite.program import build_program

    settings = config.compile
    # A program from the cache would come without its text.
    config = config.model_copy(update={"run": config.run.model_copy(update={"jax_cache_dir": None})})
    devices = topology.devices(settings.compile_topology_num_slices)
    program = build_program(config, devices)
    say(
        f"compiling for {settings.compile_topology_num_slices} x {topology.name} ({topology.shape}): "
        f"{program.mesh_plan.describe()}"
    )
    compiled = compile_step(program)
    if settings.compiled_trainstep_file is not None and compiled.executable is not None:
        target = Path(settings.compiled_trainstep_file).expanduser()
        target.write_bytes(compiled.executable.runtime_executable().serialize())
        say(f"wrote {target}")
    return make_report(config, topology, program, compiled)


def compile_step(program: Program) -> Compiled:
    """Compiles the train step of a program."""
    import jax

    start = time.monotonic()
    lowered = program.lowered_train_step
    with tempfile.TemporaryDirectory(prefix="maxlite-compile-") as directory:
        # The text as the compiler writes it: jaxlib cannot read what every newer libtpu hands back.
        options = {"xla_dump_to": directory, "xla_dump_hlo_as_text": True, "xla_dump_hlo_module_re": "jit_train_step"}
        try:
            executable = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            refused = refused_bytes(str(error))
            if refused is None:
                raise
            return Compiled(None, "", refused, time.monotonic() - start)
        seconds = time.monotonic() - start
        (text,) = [path.read_text() for path in Path(directory).glob("*.after_optimizations.txt")]
    return Compiled(executable, text, 0, seconds)


def refused_bytes(message: str) -> int | None:
    """What the compiler says a program would need that it refuses for want of memory; None: it says something else."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    needed = re.search(r"(?:temporaries \(|[Uu]sed )([\d.]+)([KMGT])", message)
    if needed is None:
        return None
    return int(float(needed[1]) * 1024 ** ("KMGT".index(needed[2]) + 1))


def find_fix(arguments: Sequence[str], topology: Topology, config: Config) -> dict[str, Any] | None:
    """The first change with which the step fits: compiled, not guessed.

    Returns:
        The keys to set, with the total bytes that they lead to; None: not even all changes together do.
    """
    keys: dict[str, Any] = {}
    for change in changes(config, topology):
        keys |= change
        say(f"does not fit; trying {typed(keys)}")
        settings = {**keys, "compiled_trainstep_file": "null"}  # the step that was asked for is the one to be kept
        own = [argument for argument in arguments if argument.partition("=")[0] not in settings]
        tried = read_command(Config, [*own, *(f"{key}={value}" for key, value in settings.items())], USAGE).config
        try:
            report = compile_report(tried, require_topology(tried))
        except InputError as error:
            say(f"not possible: {error}")
            continue
        if report.fits:
            return {"keys": keys, "total": report.hbm["total"]}
    return None


def changes(config: Config, topology: Topology) -> list[Mapping[str, Any]]:
    """Changes that need less memory, the cheapest in speed first; each is tried with those before it."""
    model, data, slices = config.model, config.data, config.compile.compile_topology_num_slices
    found: list[Mapping[str, Any]] = []
    tokens = int(data.per_device_batch_size * topology.num_devices * slices) * data.max_target_length
    if not 0 < model.loss_chunk_size <= tokens // 8:
        found.append({"loss_chunk_size": tokens // 8})
    if model.remat_policy != "full":
        found.append({"remat_policy": "full"})
    rows = data.per_device_batch_size
    while rows >= 2 and rows % 2 == 0:
        rows /= 2
        found.append({"per_device_batch_size": f"{rows:g}"})
    if slices > 1 and config.parallel.dcn_fsdp_parallelism == 1:
        found.append({"dcn_data_parallelism": 1, "dcn_fsdp_parallelism": -1})
    if (larger := topology.doubled()) is not None:
        found.append({"compile_topology": larger.name})
    return found


def typed(keys: Mapping[str, Any]) -> str:
    """Keys as they are typed."""
    return " ".join(f"{key}={value}" for key, value in keys.items())


def say(line: str) -> None:
    """Tells on standard error what takes the time."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
