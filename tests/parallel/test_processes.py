"""The processes of a run: keys that belong together, and what they show. See also test_train_processes.py."""

import os
import socket
import subprocess
import sys

import pytest

from maxlite.config import Config, InputError, ParallelConfig, resolve
from maxlite.parallel import Processes

CHILD = """
import sys
from maxlite.config import InputError, ParallelConfig
from maxlite.parallel import Processes

def report(error, process):
    print(f"{process}error: {error}", file=sys.stderr)
    return 2

try:
    with Processes(ParallelConfig(), report) as processes:
        print(f"{processes.index} of {processes.count}: {processes.describe()}")
except InputError as error:
    sys.exit(report(error, ""))
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_two(devices):
    """Two processes with so many devices each: statuses, outputs (the port's number replaced), errors."""
    port = str(free_port())
    common = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
    started = []
    for index in (0, 1):
        own = {
            "JAX_PROCESS_ID": str(index),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices[index]}",
        }
        command = [sys.executable, "-c", CHILD]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=os.environ | common | own, **pipes))
    ended = [process.communicate(timeout=120) for process in started]
    statuses = [process.returncode for process in started]
    return statuses, [output.replace(port, "PORT") for output, _ in ended], [errors for _, errors in ended]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["num_processes=2"], "needs coordinator_address=HOST:PORT"),
        (["coordinator_address=a:1"], "needs num_processes"),
        (["coordinator_address=a", "num_processes=2"], "expected HOST:PORT"),
        (["coordinator_address=a:65536", "num_processes=2"], "expected HOST:PORT"),
        (["coordinator_address=:80", "num_processes=2"], "expected HOST:PORT"),
        (["coordinator_address=a:1", "num_processes=2", "process_id=2"], "they count from 0 to 1"),
        (["process_id=1"], "they count from 0 to 0"),
    ],
)
def test_keys_that_do_not_belong_together(arguments, words):
    with pytest.raises(InputError, match=words):
        resolve(Config, None, ["run_name=r", *arguments], {})


def test_one_process_is_alone_and_primary():
    def report(error, process):
        raise AssertionError("an error of a process that is alone is its caller's")

    processes = Processes(ParallelConfig(), report, {})
    assert (processes.index, processes.count, processes.primary) == (0, 1, True)
    assert [processes.same(value) for value in (True, False)] == [True, False]
    with pytest.raises(KeyError), processes:
        raise KeyError


def test_two_meet_as_the_environment_tells():
    statuses, outputs, errors = run_two(devices=(2, 2))
    assert statuses == [0, 0], errors
    line = "2 processes of 2 devices each, met at 127.0.0.1:PORT (JAX_COORDINATOR_ADDRESS)"
    assert [output.splitlines()[-1] for output in outputs] == [f"0 of 2: ['{line}']", f"1 of 2: ['{line}']"]


def test_unequal_numbers_of_devices_are_refused_by_both():
    statuses, _, errors = run_two(devices=(2, 3))
    assert statuses == [2, 2], errors
    words = "error: all processes need the same number of devices, but there are: 2 on process 0; 3 on process 1\n"
    assert all(words in error for error in errors)


def test_who_does_not_come_is_named_in_one_line():
    address = f"127.0.0.1:{free_port()}"
    keys = [f"coordinator_address={address}", "num_processes=2", "jax_distributed_initialization_timeout=2"]
    command = [sys.executable, "-m", "maxlite.train", "run_name=r", *keys]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: coordinator_address={address}: process 1 of 2 did not come within "
        "jax_distributed_initialization_timeout=2 s; start each with the same command and its own process_id\n"
    )
