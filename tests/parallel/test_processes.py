"""The processes of a run: keys that belong together, and words when they do not meet. See test_train_processes.py."""

import socket
import subprocess
import sys

import pytest

from maxlite.config import Config, InputError, ParallelConfig, resolve
from maxlite.parallel import Processes

CHILD = """
import sys
from maxlite.config import ParallelConfig
from maxlite.parallel import Processes
keys = dict(argument.split("=") for argument in sys.argv[1:])
with Processes(ParallelConfig(**keys), lambda error, process: 1):
    print("met")
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def meet(address, index, seconds=2):
    keys = [
        f"coordinator_address={address}",
        "num_processes=2",
        f"process_id={index}",
        f"jax_distributed_initialization_timeout={seconds}",
    ]
    return subprocess.run(
        [sys.executable, "-c", CHILD, *keys], capture_output=True, text=True, timeout=120, check=False
    )


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

    processes = Processes(ParallelConfig(), report)
    assert (processes.index, processes.count, processes.primary) == (0, 1, True)
    assert [processes.same(value) for value in (True, False)] == [True, False]
    with pytest.raises(KeyError), processes:
        raise KeyError


def test_a_coordinator_that_is_not_there_is_named():
    address = f"127.0.0.1:{free_port()}"
    done = meet(address, index=1)
    assert f"InputError: coordinator_address={address}: process 0 was not reached within" in done.stderr
    assert "jax_distributed_initialization_timeout=2 s" in done.stderr
    assert "refused" in done.stderr


@pytest.mark.slow
def test_processes_that_do_not_come_are_said():
    address = f"127.0.0.1:{free_port()}"
    done = meet(address, index=0)
    assert done.returncode == 2
    assert f"process 0: error: coordinator_address={address}: not all of num_processes=2 processes came" in done.stderr
    assert "met" not in done.stdout


def test_an_address_in_use_is_named():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        done = meet(address, index=0)
    assert f"InputError: coordinator_address={address}: process 0 cannot listen there" in done.stderr
    assert "met" not in done.stdout
