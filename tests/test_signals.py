"""Stop requests: raised before the loop, remembered inside it."""

import os
import signal

import pytest

from maxlite.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_outside_the_loop_a_signal_interrupts(number):
    with StopRequest() as stop:
        with pytest.raises(KeyboardInterrupt, match=signal.Signals(number).name):
            os.kill(os.getpid(), number)
        assert stop.requested


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_inside_the_loop_a_signal_is_remembered(number, capfd):
    with StopRequest() as stop, stop.deferred():
        os.kill(os.getpid(), number)
        assert stop.requested
    assert "saving, then leaving" in capfd.readouterr().err


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopRequest():
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
