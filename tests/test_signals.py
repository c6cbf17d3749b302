"""Stop requests: at once before the loop, remembered inside it."""

import os
import signal
import subprocess
import sys

import pytest

from maxlite.config import Exit
from maxlite.signals import PREEMPTED, StopRequest

ALL = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", ALL)
def test_outside_the_loop_the_process_leaves_at_once(number):
    code = (
        f"import os; from maxlite.signals import StopRequest\nwith StopRequest(): os.kill(os.getpid(), {int(number)})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == PREEMPTED == Exit.PREEMPTED
    assert f"{number.name}: stopped before the first step" in done.stderr


@pytest.mark.parametrize("number", ALL)
def test_inside_the_loop_a_signal_is_remembered(number, capfd):
    with StopRequest() as stop:
        stop.defer()
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested == number.name
    assert "saving after this step" in capfd.readouterr().err


@pytest.mark.parametrize(("later", "left"), [(0.5, False), (1.5, True)])
def test_a_second_signal_leaves_at_once_unless_it_is_the_echo_of_the_first(later, left):
    code = (
        "import os, time; from maxlite.signals import StopRequest\n"
        "now = [100.0]; time.monotonic = lambda: now[0]\n"
        "with StopRequest() as stop:\n"
        "    stop.defer(); os.kill(os.getpid(), 15)\n"
        f"    now[0] += {later}; os.kill(os.getpid(), 15)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == (-signal.SIGTERM if left else 0)


def test_a_hang_up_that_nohup_ignores_stays_ignored():
    code = "import os, signal; from maxlite.signals import StopRequest\nwith StopRequest(): os.kill(os.getpid(), 1)"
    done = subprocess.run(["nohup", sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in ALL]
    with StopRequest():
        pass
    assert [signal.getsignal(number) for number in ALL] == before
