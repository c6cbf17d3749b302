"""When saves start: properties over random step and save durations, in simulated time."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.checkpoint.policy import LONGEST_RETRY_SECONDS, SavePolicy, Votes, worth_another_save
from maxlite.config import CheckpointConfig

CONTINUOUS = {"enable_continuous_checkpointing": True}
durations = st.lists(st.tuples(st.floats(0.01, 5), st.floats(0.01, 20)), min_size=1, max_size=60)


class Scripted:
    """A person's own policy: wants the steps it was given."""

    wanted = frozenset()

    def __init__(self):
        self.contexts = []

    def should_save(self, context):
        self.contexts.append(context)
        return context.step in self.wanted


@pytest.fixture(autouse=True)
def forget_script(monkeypatch):
    monkeypatch.setattr(Scripted, "wanted", Scripted.wanted)


class Raises:
    def should_save(self, context):
        return 1 / (3 - context.step) > 0


def due(policy, step, now, *, saving=False):
    """The decision of a run of one process."""
    return policy.decide(step, policy.votes(step, now, saving=saving))


def simulate(policy, times):
    """Runs steps of `times[i][0]` seconds; a save started after step i takes `times[i][1]`.

    Returns (step, start, end) of every save and the time after every step.
    """
    now, saves, clock, saving = 0.0, [], [], False
    for step, (step_seconds, save_seconds) in enumerate(times, start=1):
        now += step_seconds
        clock.append(now)
        if saving and now >= saves[-1][2]:
            policy.committed(now)
            saving = False
        if due(policy, step, now, saving=saving):
            policy.started(step, now)
            saves.append((step, now, now + save_seconds))
            saving = True
    return saves, clock


@settings(deadline=None)
@given(durations, st.floats(0, 30))
def test_continuous_saves_as_often_as_allowed_and_no_oftener(times, minimum):
    config = CheckpointConfig(continuous_checkpointing_minimum_interval_secs=minimum, **CONTINUOUS)
    saves, clock = simulate(SavePolicy(config), times)
    assert saves[0][0] == 1
    for (_, start, end), (step, next_start, _) in itertools.pairwise(saves):
        assert next_start >= end
        assert next_start - start >= minimum
        assert not any(end <= t < next_start and t - start >= minimum for t in clock[: step - 1])


@settings(deadline=None)
@given(durations, st.integers(1, 7), st.sampled_from([0.0, 3.0, 20.0]))
def test_fixed_saves_every_period_at_the_first_step_that_storage_allows(times, period, seconds):
    config = CheckpointConfig(checkpoint_period=period, checkpoint_period_seconds=seconds)
    saves, clock = simulate(SavePolicy(config), times)
    expected, end, owed, since = [], 0.0, False, clock[0]
    for step, now in enumerate(clock, start=1):
        owed = owed or step % period == 0
        if (owed or (seconds and now - since >= seconds)) and now >= end:
            expected.append(step)
            owed, since, end = False, now, now + times[step - 1][1]
    assert [step for step, _, _ in saves] == expected


@pytest.mark.parametrize("keys", [{}, CONTINUOUS, {"checkpoint_save_policy": f"{__name__}.Scripted"}])
def test_step_zero_is_saved_only_on_request(keys):
    assert not due(SavePolicy(CheckpointConfig(**keys)), 0, 0.0)
    assert due(SavePolicy(CheckpointConfig(save_checkpoint_on_start=True, **keys)), 0, 0.0)


@pytest.mark.parametrize("minimum", [0.0, 1000.0])
@pytest.mark.parametrize("keys", [{"checkpoint_period": 10}, CONTINUOUS])
def test_failed_save_is_owed_and_retried_ever_more_slowly(keys, minimum):
    policy = SavePolicy(CheckpointConfig(continuous_checkpointing_minimum_interval_secs=minimum, **keys))
    assert due(policy, 10, 0.0)
    delays, now, step = [], 0.0, 10
    for _ in range(9):
        policy.started(step, now)
        delays.append(policy.failed(now))
        assert not due(policy, step + 1, now + delays[-1] - 0.01)
        now, step = now + delays[-1], step + 2
        assert due(policy, step, now)
    assert delays == [1, 2, 4, 8, 16, 32, *[LONGEST_RETRY_SECONDS] * 3]
    policy.started(step, now)
    policy.committed(now)
    assert due(policy, 31, now) == (keys is CONTINUOUS and not minimum)
    policy.started(31, now)
    assert policy.failed(now) == 1


def test_a_resumed_run_waits_for_the_interval():
    policy = SavePolicy(CheckpointConfig(continuous_checkpointing_minimum_interval_secs=5, **CONTINUOUS))
    policy.resumed(7, 100.0)
    assert not due(policy, 8, 104.9)
    assert due(policy, 9, 105.0)


def test_a_budget_holds_the_first_save_back_until_there_is_something_to_compare_with():
    policy = SavePolicy(CheckpointConfig(continuous_checkpointing_max_overhead=0.05, **CONTINUOUS))
    first = None
    for step in range(1, 100):
        policy.pacing.observe_step(1.0, saving=False)
        if due(policy, step, float(step)):
            first = step
            break
    assert first == 8


@pytest.mark.parametrize(
    "keys",
    [CONTINUOUS, {"checkpoint_period_seconds": 1.0}, {"checkpoint_save_policy": f"{__name__}.Scripted"}],
)
def test_clocks_and_own_policies_speak_on_the_primary_process_only(keys, monkeypatch):
    monkeypatch.setattr(Scripted, "wanted", range(1000))
    for primary in (True, False):
        policy = SavePolicy(CheckpointConfig(**keys), primary=primary)
        policy.votes(1, 0.0, saving=False)
        assert policy.votes(2, 10.0, saving=True) == Votes(busy=True, due=primary)


processes = st.integers(1, 3).flatmap(
    lambda count: st.lists(
        st.tuples(
            st.floats(-1e6, 1e6),  # what its clock is off by
            st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=9),  # steps of saves; failed?
        ),
        min_size=count,
        max_size=count,
    )
)


@settings(deadline=None)
@given(
    st.sampled_from(
        [
            {"checkpoint_period": 4},
            {"checkpoint_period": 9, "checkpoint_period_seconds": 3.0},
            CONTINUOUS,
            {"continuous_checkpointing_minimum_interval_secs": 4, **CONTINUOUS},
            {"checkpoint_save_policy": f"{__name__}.Scripted"},
        ]
    ),
    processes,
    st.integers(0, 2),
    st.sets(st.integers(1, 80)),
)
def test_processes_that_see_only_reduced_votes_agree(keys, processes, ahead, wanted):
    """Whatever their clocks, how long their saves take, which fail, and how far steps are dispatched ahead."""
    Scripted.wanted = wanted
    policies = [SavePolicy(CheckpointConfig(**keys), primary=index == 0) for index in range(len(processes))]
    writing = [None] * len(policies)  # the step at which each one's save ends
    cast, starts, failed_at = {}, [], None
    for step in range(1, 120):
        for index, (policy, (offset, saves)) in enumerate(zip(policies, processes, strict=True)):
            now = offset + 2.0 * step + 0.1 * index
            if writing[index] is not None and step >= writing[index]:
                writing[index] = None
                if step < 60 and saves[len(starts) % len(saves)][1]:
                    policy.failed(now)
                    failed_at = step
                else:
                    policy.committed(now)
            votes = policy.votes(step, now, saving=writing[index] is not None)
            before = cast.get(step, Votes(busy=False, due=False))
            cast[step] = Votes(busy=votes.busy or before.busy, due=votes.due or before.due)
        decided = step - ahead
        if decided < 1:
            continue
        answers = {policy.decide(decided, cast[decided]) for policy in policies}
        assert len(answers) == 1
        if answers == {True}:
            assert writing == [None] * len(policies)  # none is held up by a save of its own
            starts.append(decided)
            for index, (policy, (offset, saves)) in enumerate(zip(policies, processes, strict=True)):
                policy.started(decided, offset + 2.0 * step + 0.1 * index)
                writing[index] = step + 1 + saves[len(starts) % len(saves)][0]
    if failed_at is not None:
        assert starts[-1] > failed_at - ahead  # it was tried again, on whichever process it had failed


def test_votes_cast_before_a_save_started_start_no_second_one():
    policy = SavePolicy(CheckpointConfig(**CONTINUOUS))
    votes = [policy.votes(step, float(step), saving=False) for step in (1, 2)]
    assert policy.decide(1, votes[0])
    policy.started(1, 2.5)
    assert votes[1] == Votes(busy=False, due=True)
    assert not policy.decide(2, votes[1])


def test_what_comes_up_for_a_step_dispatched_ahead_outlives_the_save_of_an_earlier_one(monkeypatch):
    monkeypatch.setattr(Scripted, "wanted", {1, 2})
    owed = SavePolicy(CheckpointConfig(checkpoint_period=1))
    own = SavePolicy(CheckpointConfig(checkpoint_save_policy=f"{__name__}.Scripted"))
    for policy in (owed, own):
        votes = [policy.votes(step, float(step), saving=False) for step in (1, 2)]
        assert policy.decide(1, votes[0])
        policy.started(1, 3.0)
        assert not policy.decide(2, votes[1])
        policy.committed(3.5)
        assert due(policy, 3, 4.0)


def test_a_save_that_failed_on_another_process_than_the_primary_is_wanted_and_delayed_by_it():
    policy = SavePolicy(CheckpointConfig(), primary=False)
    policy.started(1, 10.0)
    assert policy.failed(20.0) == 1
    assert policy.votes(2, 20.5, saving=False) == Votes(busy=True, due=True)
    assert policy.votes(3, 21.0, saving=False) == Votes(busy=False, due=True)


def test_an_own_policy_takes_the_place_of_the_timing_and_is_told_what_happened(monkeypatch):
    monkeypatch.setattr(Scripted, "wanted", {2, 4})
    keys = {"checkpoint_period": 1, "checkpoint_save_policy": f"{__name__}.Scripted"}
    policy = SavePolicy(CheckpointConfig(**keys))
    assert not due(policy, 1, 1.0)
    assert due(policy, 2, 2.0)
    policy.started(2, 2.0)
    assert not due(policy, 3, 3.0, saving=True)
    assert not due(policy, 4, 4.0, saving=True)  # wanted, while one is being written: remembered
    policy.committed(4.5)
    assert due(policy, 5, 5.0)
    policy.started(5, 5.0)
    assert policy.failed(6.0) == 1
    assert not due(policy, 6, 6.5)
    assert due(policy, 7, 7.0)  # what failed is tried again, wanted or not
    contexts = {context.step: context for context in policy._custom.contexts}
    assert contexts[1] == (1, False, None, None, None, None)
    assert contexts[4] == (4, True, 2, None, 2.0, None)
    assert contexts[7] == (7, False, 5, 2, 2.0, 2.5)


@pytest.mark.parametrize(
    ("keys", "next_due"),
    [
        ({"checkpoint_period": 3}, 5.0),
        ({"checkpoint_period_seconds": 2}, 4.0),
        ({"enable_continuous_checkpointing": True}, 3.0),
    ],
)
def test_an_own_policy_that_raises_is_named_and_the_keys_apply_from_then_on(keys, next_due):
    policy = SavePolicy(CheckpointConfig(checkpoint_save_policy=f"{__name__}.Raises", **keys))
    assert due(policy, 1, 1.0)
    assert policy.problem() is None
    policy.started(2, 2.0)
    policy.committed(2.5)
    found = [now for step, now in ((3, 3.0), (4, 4.0), (5, 5.0)) if due(policy, step, now)]
    assert found[0] == next_due
    assert re.search(r"Raises\.should_save raised ZeroDivisionError: .*test_policy\.py:\d+", policy.problem())
    assert policy.problem() is None, "said more than once"


seconds = st.floats(0, 100)


@settings(deadline=None)
@given(grace=seconds, save_seconds=seconds, work=seconds)
def test_another_save_is_worth_it_if_it_loses_less_time(grace, save_seconds, work):
    lost = save_seconds + (0 if save_seconds < grace else work)
    assert worth_another_save(grace, save_seconds=save_seconds, work_seconds=work) == (lost < work)


def test_another_save_of_unknown_length_is_tried():
    assert worth_another_save(5, save_seconds=None, work_seconds=9)
    assert not worth_another_save(0, save_seconds=None, work_seconds=9)
    assert not worth_another_save(5, save_seconds=None, work_seconds=0)
