"""A step's time runs until its result is ready, and one step at most is in flight."""

import threading

from maxlite.telemetry.timer import StepTimer


class Device:
    """Steps that are ready `work` seconds after they can start. Who waits for a result sees the clock move to then."""

    def __init__(self, work):
        self.now, self.work, self.free_at = 0.0, work, 0.0
        self.watcher = threading.local()

    def clock(self):
        return getattr(self.watcher, "now", self.now)

    def step(self, state, batch):
        self.free_at = max(self.now, self.free_at) + self.work
        ready_at = self.free_at
        device = self

        class Result:
            def block_until_ready(self):
                device.watcher.now = ready_at
                return self

            def __float__(self):
                device.now = max(device.now, ready_at)
                return float(batch)

        return state + 1, {"loss": Result()}


def test_back_to_back_steps_take_the_devices_time_not_the_dispatch_time():
    device = Device(work=2.0)
    with StepTimer(device.clock) as timer:
        state, finished = timer.run(1, device.step, 0, 10)
        assert (state, finished) == (1, None)
        state, finished = timer.run(2, device.step, state, 20)
        assert (finished.step, finished.metrics, finished.seconds, finished.ready_at) == (1, {"loss": 10.0}, 2.0, 2.0)
        device.now += 0.5  # the host's work beside the device's does not count twice
        state, finished = timer.run(3, device.step, state, 30)
        assert (finished.step, finished.seconds, finished.ready_at) == (2, 2.0, 4.0)
        finished = timer.drain()
        assert (finished.step, finished.seconds, finished.ready_at) == (3, 2.0, 6.0)
        assert timer.drain() is None


def test_a_host_that_comes_late_does_not_make_the_step_longer():
    device = Device(work=2.0)
    with StepTimer(device.clock) as timer:
        timer.run(1, device.step, 0, 0)
        device.now += 50.0  # the next batch was late
        _, finished = timer.run(2, device.step, 0, 0)
        assert (finished.seconds, finished.ready_at) == (2.0, 2.0)
        assert timer.drain().seconds == 2.0


def test_time_between_steps_is_not_the_next_steps():
    device = Device(work=2.0)
    with StepTimer(device.clock) as timer:
        timer.run(1, device.step, 0, 0)
        timer.drain()
        device.now += 100.0  # a save, an evaluation
        timer.run(2, device.step, 0, 0)
        assert timer.drain().seconds == 2.0
