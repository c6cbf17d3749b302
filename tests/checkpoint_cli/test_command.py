"""The command as a person starts it: exit statuses, one line per error, and no accelerator touched."""

import json
import os
import subprocess
import sys

import pytest

from maxlite.checkpoint.cli import CLOSED_PIPE


def start(*arguments, **keywords):
    # The message of the test's own environment aside: what the command does when nobody set JAX_PLATFORMS.
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, **keywords)


def checkpoint(*arguments):
    return start("-m", "maxlite.checkpoint", *arguments)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["list", "{run}", "--json"], 0),
        (["show", "{run}"], 0),
        (["verify", "{run}"], 0),
        (["diff", "{run}", "{run}"], 0),
        (["diff", "{run}/checkpoints/10", "{run}/checkpoints/20"], 1),
        (["prune", "{run}", "--keep", "1"], 0),
    ],
)
def test_exit_status(run, arguments, status):
    done = checkpoint(*(argument.format(run=run.directory) for argument in arguments))
    assert (done.returncode, done.stderr) == (status, "")
    if "--json" in arguments:
        assert json.loads(done.stdout)


@pytest.mark.parametrize("command", ["list", "show", "verify", "diff", "prune"])
def test_help(command):
    done = checkpoint(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: python -m maxlite.checkpoint {command} ")
    assert "exit status: 0 " in done.stdout


COMMANDS = {"list": [], "show": [], "verify": [], "prune": ["--keep", "1"]}


@pytest.mark.parametrize(("command", "more"), COMMANDS.items())
def test_no_such_place_is_one_line(tmp_path, cli, command, more):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    for place, words in (("none", "no such directory"), ("file", "a file; name"), ("empty", "no checkpoint there")):
        status, out, err = cli(command, tmp_path / place, *more)
        assert (status, out) == (2, "")
        assert err.startswith(f"error: {tmp_path / place}: {words}")
        assert len(err.splitlines()) == 1


def test_unknown_kind_of_storage_is_one_line(cli):
    status, out, err = cli("list", "ftpp://host/run")
    assert (status, out) == (2, "")
    assert err == "error: ftpp://host/run: no such kind of storage; use a local path, gs:// or s3://\n"


def test_step_that_is_not_there_names_those_that_are(run, cli):
    for command in (["diff", run.step(10)], ["show"]):
        status, _, err = cli(*command, run.step(11))
        assert status == 2
        assert err == f"error: {run.step(11)}: no such directory; steps there: 30, 20, 10\n"


@pytest.mark.parametrize("arguments", [[], ["nope"], ["list"], ["list", "a", "--no-such-flag"], ["diff", "a"]])
def test_wrong_arguments_are_one_line(cli, arguments):
    status, out, err = cli(*arguments)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "--help" in err


def test_unreadable_storage_is_one_line(run, cli, monkeypatch):
    from maxlite.checkpoint import layout

    def fail(directory):
        raise PermissionError(13, "Permission denied", str(directory))

    monkeypatch.setattr(layout, "steps", fail)
    status, _, err = cli("list", run.directory)
    assert (status, err) == (2, f"error: Permission denied: {run.checkpoints}\n")


PROBE = """
import sys
from maxlite.checkpoint.cli import main
status = main(sys.argv[1:])
import jax
from jax._src import xla_bridge
print(status, xla_bridge.backends_are_initialized(), jax.config.jax_platforms)
"""


@pytest.mark.parametrize(
    ("arguments", "ends"),
    [
        (["list", "{run}"], "0 False None"),
        (["show", "{run}"], "0 False None"),
        (["verify", "{run}/nothing"], "2 False None"),
        (["verify", "{run}"], "0 True cpu"),
        (["diff", "{run}", "{run}"], "0 True cpu"),
        (["prune", "{run}", "--keep", "1"], "0 True cpu"),
    ],
)
def test_no_device_but_the_cpu_is_touched(run, arguments, ends):
    done = start("-c", PROBE, *(argument.format(run=run.directory) for argument in arguments))
    assert done.stdout.splitlines()[-1] == ends


def test_closed_pipe_ends_quietly(run):
    read, write = os.pipe()
    os.close(read)  # as if `head` had ended
    command = [sys.executable, "-m", "maxlite.checkpoint", "show", str(run.directory)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write)
    assert (done.returncode, done.stderr) == (CLOSED_PIPE, "")
