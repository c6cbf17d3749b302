"""Storage that misbehaves under the real trainer, as one process and as two that save together.

Disk full is a small tmpfs that a file fills and leaves again; where only one of two processes is to be hit, the kernel
lets no file of that process grow (RLIMIT_FSIZE, set and lifted from outside; it says "File too large"). A read-only
directory is a bind mount: root may write whatever the mode bits say. Where nothing may be mounted these are skipped. A
write that hangs is injected: the process runs the trainer with an Orbax writer that waits for ever, once.
"""

import re
import resource
import shutil
import signal
import subprocess
from contextlib import contextmanager

import pytest

pytestmark = pytest.mark.slow

MEGABYTES = 40
ARGUMENTS = [
    "base_mlp_dim=2048",  # 5 MB of state
    "enable_continuous_checkpointing=true",
    "max_num_checkpoints_to_keep=2",
    "eval_steps=0",
]
FOREVER = "steps=100000000"
COMPRESSED = "checkpoint_storage_compression=true"  # how much it takes is not known before, so the write itself fails

# Runs the trainer; its second write never ends.
HANGS = (
    "-c",
    """
import sys, threading
from maxlite.checkpoint import orbax_io
finish, count = orbax_io.Writer.finish, 0
def hang(writer):
    global count
    count += 1
    threading.Event().wait(None if count == 2 else 0)
    finish(writer)
orbax_io.Writer.finish = hang
from maxlite.train import main
sys.exit(main(sys.argv[1:]))
""",
)
TRAINS = ("-m", "maxlite.train")


def mount(*arguments):
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"may not mount here: {done.stderr.strip()}")


@contextmanager
def full(run):
    """Fills the disk that the run is on."""
    filler = run.folder / "runs" / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError as error:
            assert error.strerror == "No space left on device"
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def no_file_grows(process, size=1 << 17):
    """Every write past `size` bytes of the process fails."""
    before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        if process.poll() is None:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)


@pytest.fixture
def small_disk(make_run):
    """A run whose directory is on a disk of a few megabytes."""
    run = make_run("small")
    disk = run.folder / "runs"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", disk)
    yield run
    subprocess.run(["umount", "--lazy", disk], check=True)


def failures(text):
    return re.findall(r"^save of step \d+ failed, .*$", text, re.MULTILINE)


def goes_on(several):
    """Trains a few more steps."""
    several.wait_for_step(several.newest_logged + 3)


def starts_saving(several):
    several.wait(lambda: len(several.run.steps()) >= 2)


def commits_again(several):
    """There is a newer step than any there was, and the run ends well."""
    newest = several.run.steps()[-1:]
    several.wait(lambda: several.run.steps()[-1:] > newest)
    loses_nothing(several)


def loses_nothing(several):
    """Ended by a signal, its last step is saved."""
    several.processes[-1].send_signal(signal.SIGTERM)
    statuses, outputs, _ = several.end()
    assert set(statuses) == {5}, several.printed()
    assert f"step {several.run.steps()[-1]} is saved" in outputs[0]
    assert several.run.left_in_checkpoints() == sorted(map(str, several.run.steps()))
    assert not any("Traceback" in text for text in several.printed()), several.printed()


def is_reported_and_leaves_nothing(several, reason, times=2):
    """Said in one line each time, with the reason; tried again; nothing of it is left, and training goes on."""
    run, committed = several.run, several.run.steps()
    several.wait(lambda: len(failures(several.output())) >= times)
    lines = failures(several.output())
    assert all(reason in line for line in lines), lines
    waits = [int(re.search(r"next try in (\d+) s", line)[1]) for line in lines]
    assert waits == [2**i for i in range(len(waits))]
    assert len({re.search(r"step \d+", line)[0] for line in lines}) == len(lines), "said more than once"
    several.wait(lambda: run.left_in_checkpoints() == sorted(map(str, run.steps())), seconds=30)
    assert run.steps() == committed
    goes_on(several)


@pytest.mark.parametrize(("count", "arguments"), [(1, []), (1, [COMPRESSED]), (2, [COMPRESSED])])
def test_a_full_disk_is_said_and_saves_go_on_when_there_is_space(start_several, small_disk, count, arguments):
    several = start_several(*ARGUMENTS, *arguments, FOREVER, run=small_disk, count=count)
    starts_saving(several)
    with full(small_disk):
        is_reported_and_leaves_nothing(several, "No space left")
    commits_again(several)


@pytest.mark.parametrize("index", [0, 1])
def test_a_fault_of_one_process_is_known_to_both(start_several, index):
    two = start_several(*ARGUMENTS, FOREVER)
    starts_saving(two)
    with no_file_grows(two.processes[index]):
        is_reported_and_leaves_nothing(two, "File too large")
        assert all(("process 1: " in line) == (index == 1) for line in failures(two.output()))
    commits_again(two)


@pytest.mark.parametrize("index", [0, 1])
def test_both_stop_when_one_cannot_save_and_that_is_asked_for(start_several, index):
    two = start_several(*ARGUMENTS, FOREVER, "on_save_failure=stop")
    starts_saving(two)
    with no_file_grows(two.processes[index]):
        statuses, _, errors = two.end(timeout=60)
    assert statuses == [3, 3], two.printed()
    assert re.search(r"^process 0: error: a save failed \(.*File too large.*step \d+ is the newest", errors[0], re.M)
    assert not any("Traceback" in text for text in two.printed()), two.printed()


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_that_ends_without_its_last_state_committed_says_so(start_several, count):
    several = start_several(*ARGUMENTS, "steps=150", "on_save_failure=keep_training", count=count)
    several.wait(lambda: several.run.steps())
    with no_file_grows(several.processes[-1]):
        statuses, _, errors = several.end()
    assert set(statuses) == {3}, several.printed()
    assert "error: the final state, step 150, is not saved in " in errors[0]
    assert "File too large" in errors[0]
    assert several.run.left_in_checkpoints() == sorted(map(str, several.run.steps()))


@pytest.mark.parametrize(
    ("count", "when"),
    [
        (1, ["enable_continuous_checkpointing=true"]),  # the next save makes it again, and tells
        (1, ["enable_continuous_checkpointing=false", "checkpoint_period=100000"]),  # only the look at it tells
        (2, ["enable_continuous_checkpointing=false", "checkpoint_period=100000"]),
    ],
)
def test_a_directory_that_is_removed_is_said_and_made_again(start_several, count, when):
    several = start_several(*ARGUMENTS, "save_checkpoint_on_start=true", *when, FOREVER, count=count)
    several.wait(lambda: several.run.steps())
    several.wait_for_step(3)
    shutil.rmtree(several.run.checkpoints, ignore_errors=True)
    several.wait(lambda: re.search(r"^checkpoint \S+ has vanished|^save of step \d+ failed", several.output(), re.M))
    several.wait(lambda: several.run.steps())
    loses_nothing(several)


@pytest.mark.parametrize("count", [1, 2])
def test_a_directory_that_becomes_read_only_is_said(start_several, count):
    several = start_several(*ARGUMENTS, FOREVER, count=count)
    starts_saving(several)
    path = several.run.checkpoints
    mount("--bind", path, path)
    try:
        mount("-o", "remount,bind,ro", path)
        several.wait(lambda: len(failures(several.output())) >= 2)
        assert all("Read-only file system" in line for line in failures(several.output()))
        goes_on(several)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
    commits_again(several)


@pytest.mark.parametrize("programs", [[HANGS], [HANGS, TRAINS], [TRAINS, HANGS]])
def test_a_write_that_hangs_is_late_then_given_up_then_made_again(start_several, programs):
    several = start_several(
        *ARGUMENTS, FOREVER, "checkpoint_timeout_seconds=13", count=len(programs), programs=programs
    )
    several.wait(lambda: re.search(r"^save of step \d+ is late: not committed after 1\d s", several.output(), re.M))
    goes_on(several)
    several.wait(lambda: failures(several.output()))
    assert re.search(r"not committed within|did not answer within 13 s", failures(several.output())[0])
    commits_again(several)
