"""Processes whose output is passed on: lines stay whole, nothing is lost, nobody is left behind."""

import os
import re
import signal
import subprocess
import sys

import pytest

from maxlite.children import Child, Children

# Other tests of the worker may have loaded jax, which warns of every fork; the launcher itself never loads it.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")

PARENT = """
import sys
from maxlite.children import Child, Children
with Children([Child(["sh", "-c", script], {}) for script in sys.argv[1:]]) as children:
    while None in children.statuses():
        children.pump(0.05)
print(children.statuses(), flush=True)
"""


def parent(*scripts, **options):
    """A process that runs each script in a child of its own."""
    return subprocess.Popen([sys.executable, "-c", PARENT, *scripts], stderr=subprocess.PIPE, **options)


def run(*scripts):
    process = parent(*scripts, stdout=subprocess.PIPE)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    *lines, statuses = output.splitlines()
    return lines, errors.splitlines(), statuses.decode()


def test_lines_of_several_do_not_mix():
    # Each line is written in pieces, so that the pieces of the two would mix if they were passed on as they come.
    pieces = "; ".join(f"for j in a b c d; do printf {letter}; done; echo" for letter in "xyz" * 50)
    lines, _, statuses = run(pieces, pieces)
    assert statuses == "[0, 0]"
    for index in (b"0", b"1"):
        own = [line.removeprefix(b"[%s] " % index) for line in lines if line.startswith(b"[%s] " % index)]
        assert own == [letter.encode() * 4 for letter in "xyz" * 50]
    assert len(lines) == 300


def test_streams_stay_apart_and_the_last_line_need_not_end():
    lines, errors, statuses = run("echo out; echo err >&2; printf half", "printf '\\377'; exit 7")
    assert sorted(lines) == [b"[0] half", b"[0] out", b"[1] \xff"]
    assert errors == [b"[0] err"]
    assert statuses == "[0, 7]"


def test_much_at_once_arrives_whole():
    lines, _, _ = run("seq 200000", "head -c 300000 /dev/zero | tr '\\0' x")
    assert [line for line in lines if line.startswith(b"[0]")] == [b"[0] %d" % i for i in range(1, 200_001)]
    assert lines.count(b"[1] " + b"x" * 300_000) == 1


def test_a_reader_that_leaves_does_not_end_the_run():
    read, write = os.pipe()
    process = parent("i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done; echo done >&2", stdout=write)
    os.close(write)
    os.read(read, 10)
    os.close(read)
    _, errors = process.communicate(timeout=60)
    assert b"[0] done\n" in errors


def test_what_still_runs_at_the_end_is_killed_with_its_own_children(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = f"exec 3> {fifo}; trap '' TERM; sleep 600 & echo up >&3; wait"
    ends_before = f"exec 3> {fifo}; sleep 600 & exit 0"
    with Children([Child(["sh", "-c", text], os.environ) for text in (script, ends_before)]) as children:
        reader = fifo.open("rb")
        assert reader.readline() == b"up\n"
        while children.statuses()[1] is None:
            children.pump(0.05)
        children.send(signal.SIGTERM)
        children.pump(0.1)
        assert children.statuses() == [None, 0]
    assert children.statuses() == [-signal.SIGKILL, 0]
    with reader:
        assert reader.read() == b"", "the pipe ends when all that held it are gone"


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_they_die_with_a_parent_that_is_killed(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    process = parent(f"exec 3> {fifo}; echo up >&3; exec sleep 600", stdout=subprocess.PIPE)
    with fifo.open("rb") as reader:
        assert reader.readline() == b"up\n"
        process.kill()
        assert reader.read() == b"", "it ends when the child is gone"
    process.communicate()


def test_a_command_that_cannot_start_leaves_no_other_behind(capfd):
    children = Children([Child(["sleep", "600"], os.environ), Child(["/no/such/program"], os.environ)])
    with pytest.raises(FileNotFoundError), children:
        pass
    assert children.statuses() == [-signal.SIGKILL]
    assert not re.search(r"\[\d\]", "".join(capfd.readouterr()))
