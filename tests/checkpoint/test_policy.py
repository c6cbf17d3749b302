"""When saves start: properties over random step and save durations, in simulated time."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from maxlite.checkpoint.policy import LONGEST_RETRY_SECONDS, SavePolicy
from maxlite.config import CheckpointConfig

durations = st.lists(st.tuples(st.floats(0.01, 5), st.floats(0.01, 20)), min_size=1, max_size=60)


def simulate(policy, times):
    """Runs steps of `times[i][0]` seconds; a save started after step i takes `times[i][1]`.

    Returns (step, start, end) of every save and the time after every step.
    """
    now, saves, clock = 0.0, [], []
    for step, (step_seconds, save_seconds) in enumerate(times, start=1):
        now += step_seconds
        clock.append(now)
        saving = bool(saves) and now < saves[-1][2]
        if saves and not saving:
            policy.committed()
        if policy.due(step, now, saving=saving):
            policy.started(now)
            saves.append((step, now, now + save_seconds))
    return saves, clock


@given(durations, st.floats(0, 30))
def test_continuous_saves_as_often_as_allowed_and_no_oftener(times, minimum):
    config = CheckpointConfig(
        enable_continuous_checkpointing=True, continuous_checkpointing_minimum_interval_secs=minimum
    )
    saves, clock = simulate(SavePolicy(config), times)
    assert saves[0][0] == 1
    for (_, start, end), (step, next_start, _) in itertools.pairwise(saves):
        assert next_start >= end
        assert next_start - start >= minimum
        assert not any(end <= t < next_start and t - start >= minimum for t in clock[: step - 1])


@given(durations, st.integers(1, 7))
def test_fixed_saves_every_period_at_the_first_step_that_storage_allows(times, period):
    saves, clock = simulate(SavePolicy(CheckpointConfig(checkpoint_period=period)), times)
    expected, end = [], 0.0
    owed = False
    for step, now in enumerate(clock, start=1):
        owed = owed or step % period == 0
        if owed and now >= end:
            expected.append(step)
            owed, end = False, now + times[step - 1][1]
    assert [step for step, _, _ in saves] == expected


def test_step_zero_is_saved_only_on_request():
    for continuous in (False, True):
        keys = {"enable_continuous_checkpointing": continuous}
        assert not SavePolicy(CheckpointConfig(**keys)).due(0, 0.0, saving=False)
        assert SavePolicy(CheckpointConfig(save_checkpoint_on_start=True, **keys)).due(0, 0.0, saving=False)


def test_failed_save_is_owed_and_retried_ever_more_slowly():
    policy = SavePolicy(CheckpointConfig(checkpoint_period=10))
    assert policy.due(10, 0.0, saving=False)
    delays, now = [], 0.0
    for _ in range(9):
        policy.started(now)
        delays.append(policy.failed(now))
        assert not policy.due(11, now + delays[-1] - 0.01, saving=False)
        now += delays[-1]
        assert policy.due(11, now, saving=False)
    assert delays == [1, 2, 4, 8, 16, 32, *[LONGEST_RETRY_SECONDS] * 3]
    policy.started(now)
    policy.committed()
    assert not policy.due(11, now, saving=False)
    policy.started(now)
    assert policy.failed(now) == 1
