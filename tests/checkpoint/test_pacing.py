"""How often continuous saves start: simulated training with noise, drift and hiccups, and simulated failures."""

import itertools
import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.checkpoint.pacing import BASELINE_STEPS, Pacing, young_daly_seconds
from maxlite.checkpoint.policy import SavePolicy
from maxlite.config import CheckpointConfig

WARM_UP_STEPS = 200


@dataclass(frozen=True)
class Machine:
    """What training and saves are like on it."""

    step: float = 0.5  # seconds
    noise: float = 0.05  # standard deviation of the logarithm of a step's seconds
    save: float = 3.0  # seconds from the start of a save to its commit
    save_noise: float = 0.1  # as `noise`, of a save's seconds
    slow: float = 1.25  # how many times as long a step takes during a save
    blocked: float = 0.05  # seconds that a save holds training
    drift: float = 1.0  # how many times as long a step takes at the end of the run as at its start
    jump: float = 1.0  # how many times as long a step takes after half of the run, all at once
    hiccups: float = 0.0  # share of steps that take 2 to 8 times as long


@dataclass(frozen=True)
class Run:
    """What came of it, after the warm-up."""

    overhead: float  # seconds that saves cost, as a share of the seconds of the same steps without saves
    intervals: list[float]  # seconds between two starts of saves
    pacing: Pacing
    first: int | None  # the step of the first save
    lines: list[str]  # what `changed` said


def train(machine, steps, seed=0, **keys):
    policy = SavePolicy(CheckpointConfig(enable_continuous_checkpointing=True, **keys))
    rng, now, ends, starts, lines = random.Random(seed), 0.0, None, [], []
    without, cost, first, blocked = 0.0, 0.0, None, 0.0

    def noise(scale):
        return math.exp(rng.gauss(0, scale) - scale**2 / 2)

    for step in range(1, steps + 1):
        alone = machine.step * noise(machine.noise) * machine.drift ** (step / steps)
        alone *= machine.jump if step > steps / 2 else 1.0
        alone *= rng.uniform(2, 8) if rng.random() < machine.hiccups else 1.0
        alone += 30.0 if step == 1 else 0.0  # compilation
        saving = ends is not None
        share = min(1.0, max(0.0, ends - now) / (alone * machine.slow)) if saving else 0.0
        seconds = alone * (1 + (machine.slow - 1) * share)
        now += seconds
        policy.pacing.observe_step(seconds, saving)
        if saving and now >= ends:
            policy.committed(now)
            policy.pacing.observe_save(blocked, ends - starts[-1])
            ends = None
        if step > WARM_UP_STEPS:
            without, cost = without + alone, cost + seconds - alone
        if line := policy.pacing.changed():
            lines.append(line)
        if policy.decide(step, policy.votes(step, now, saving=ends is not None)):
            policy.started(step, now)
            starts.append(now)
            first = first or step
            blocked = machine.blocked * noise(machine.save_noise)
            ends = now + machine.save * noise(machine.save_noise)
            now += blocked
            cost += blocked if step > WARM_UP_STEPS else 0.0
    warm = [after - before for before, after in itertools.pairwise(starts)]
    return Run(cost / without, warm[len(warm) // 4 :], policy.pacing, first, lines)


def true_cost(machine):
    """Seconds that one save costs."""
    return machine.blocked + machine.save * (1 - 1 / machine.slow)


MACHINES = {
    "exact": Machine(noise=0.0, save_noise=0.0),
    "usual": Machine(),
    "noisy": Machine(noise=0.2, save_noise=0.4),
    "slower and slower": Machine(drift=1.6),
    "faster and faster": Machine(drift=0.6),
    "twice as slow at once": Machine(jump=2.0),
    "twice as fast at once": Machine(jump=0.5),
    "hiccups": Machine(hiccups=0.01),
    "short saves": Machine(save=0.3),
    "long saves": Machine(save=12.0),
    "saves that block": Machine(save=0.6, slow=1.0, blocked=0.4),
    "saves that nearly stop training": Machine(slow=4.0, blocked=1.0),
    "saves that hardly cost": Machine(slow=1.01, blocked=0.0),
}


@pytest.mark.parametrize("budget", [0.02, 0.05, 0.2])
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_the_mean_slow_down_stays_within_the_budget(machine, budget):
    run = train(machine, 5000, continuous_checkpointing_max_overhead=budget)
    assert run.overhead <= budget


@pytest.mark.parametrize("budget", [0.02, 0.05, 0.2])
def test_the_budget_is_used(budget):
    """Else work is at risk for longer than was asked for."""
    run = train(MACHINES["usual"], 5000, continuous_checkpointing_max_overhead=budget)
    assert run.overhead >= 0.75 * budget


def test_saves_that_hardly_cost_follow_one_another():
    """But for two steps each, by which the cost of the next ones is known."""
    machine = MACHINES["saves that hardly cost"]
    run = train(machine, 3000, continuous_checkpointing_max_overhead=0.05)
    assert np.median(run.intervals) <= machine.save + 4 * machine.step


@pytest.mark.parametrize("mtbf_hours", [0.02, 0.2, 1.0])
def test_the_young_daly_interval_is_reached(mtbf_hours):
    machine = MACHINES["usual"]
    run = train(machine, 6000, expected_mtbf_hours=mtbf_hours)
    best = young_daly_seconds(true_cost(machine), 3600 * mtbf_hours)
    assert np.median(run.intervals) == pytest.approx(max(best, machine.save), rel=0.15)


def test_the_budget_goes_before_the_failure_rate():
    keys = {"continuous_checkpointing_max_overhead": 0.01, "expected_mtbf_hours": 0.02}
    assert train(MACHINES["usual"], 5000, **keys).overhead <= 0.01


@pytest.mark.parametrize("minimum", [0.0, 7.5])
def test_without_budget_and_failure_rate_nothing_is_imposed(minimum):
    machine = MACHINES["usual"]
    run = train(machine, 500, continuous_checkpointing_minimum_interval_secs=minimum)
    assert run.first == 1
    assert run.pacing.interval_seconds() == minimum
    assert np.median(run.intervals) <= max(machine.save, minimum) + 2 * machine.step
    assert run.lines == []
    assert run.pacing.explain().startswith("a save starts as soon as the last one is committed")


@settings(deadline=None, max_examples=40)
@given(
    st.builds(
        Machine,
        step=st.floats(0.05, 10),
        save=st.floats(0.05, 60),
        slow=st.floats(1.0, 3.0),
        blocked=st.floats(0.0, 1.0),
        hiccups=st.sampled_from([0.0, 0.01]),
    ),
    st.fixed_dictionaries(
        {
            "continuous_checkpointing_max_overhead": st.sampled_from([0.0, 0.03, 0.3]),
            "expected_mtbf_hours": st.sampled_from([0.0, 0.1, 24.0]),
            "continuous_checkpointing_minimum_interval_secs": st.sampled_from([0.0, 33.0]),
        }
    ),
    st.integers(0, 1000),
)
def test_no_save_starts_sooner_than_any_rule_allows(machine, keys, seed):
    run = train(machine, 400, seed, **keys)
    minimum = keys["continuous_checkpointing_minimum_interval_secs"]
    assert all(seconds >= minimum for seconds in run.intervals)
    assert run.pacing.interval_seconds() >= minimum
    if keys["continuous_checkpointing_max_overhead"] or keys["expected_mtbf_hours"]:
        assert run.first is None or run.first >= BASELINE_STEPS
        assert run.lines[0].startswith("8 steps without a save, then one save, are measured first")


def pacing_of(steps, saves, **keys):
    """After `steps` steps of 1 second, then `saves` of (blocked, [seconds of steps], seconds to commit)."""
    pacing = Pacing(CheckpointConfig(enable_continuous_checkpointing=True, **keys))
    for _ in range(steps):
        pacing.observe_step(1.0, saving=False)
    for blocked, seconds, commit in saves:
        for second in seconds:
            pacing.observe_step(second, saving=True)
        pacing.observe_save(blocked, commit)
    return pacing


def test_it_says_what_was_chosen_and_why():
    keys = {"continuous_checkpointing_max_overhead": 0.05, "expected_mtbf_hours": 6}
    pacing = pacing_of(8, [(0.1, [1.2, 1.3, 1.2], 3.1)], **keys)
    assert pacing.explain() == (
        "a save every 186 s, by expected_mtbf_hours=6: one costs 0.8 s of training (0.1 s blocked, 0.7 s in slower "
        "steps) and takes 3.1 s to commit; asked is continuous_checkpointing_max_overhead=0.05 for 18.6 s, "
        "expected_mtbf_hours=6 for 186 s, storage for 5.1 s"
    )
    waiting = pacing_of(0, [], continuous_checkpointing_minimum_interval_secs=30)
    assert waiting.explain() == "a save starts as soon as the last one is committed, at least 30 s after it started"


def test_it_says_again_only_what_has_moved_by_a_quarter():
    pacing = pacing_of(8, [], continuous_checkpointing_max_overhead=0.05)
    assert "measured first" in pacing.changed()
    assert pacing.changed() == ""
    pacing.observe_save(1.0, 2.0)
    assert pacing.changed() == pacing.explain()
    for blocked, says in ((1.2, False), (1.2, False), (2.0, False), (2.0, True), (1.0, False)):
        pacing.observe_save(blocked, 2.0)
        assert bool(pacing.changed()) is says, blocked


def test_a_quarter_of_the_saves_may_be_struck_by_something_else():
    usual, struck = (0.0, [1.25] * 4, 5.0), (0.0, [1.25, 1.25, 1.25, 300.0], 300.0)
    keys = {"continuous_checkpointing_max_overhead": 0.05}
    expected = pacing_of(32, [usual] * 16, **keys).interval_seconds()
    assert pacing_of(32, [struck, *[usual] * 3] * 4, **keys).interval_seconds() == pytest.approx(expected)


def test_saves_before_there_is_something_to_compare_with_say_nothing():
    pacing = pacing_of(0, [(9.0, [1.0], 9.0)], continuous_checkpointing_max_overhead=0.05)
    assert pacing.interval_seconds() == math.inf
    for _ in range(BASELINE_STEPS):
        pacing.observe_step(1.0, saving=False)
    assert pacing.interval_seconds() == 0


@pytest.mark.parametrize(("cost", "latency"), [(0.5, 0.0), (5.0, 0.0), (5.0, 60.0), (60.0, 60.0), (600.0, 0.0)])
def test_the_young_daly_interval_is_near_the_best_of_simulated_failures(cost, latency):
    """Saves start every `interval`; each costs `cost` and is committed after `latency`; failures are Poisson."""
    mtbf = 3600.0
    lives = np.random.default_rng(0).exponential(mtbf, 400_000)

    def kept(interval):
        """The share of time that moved training forward and survived."""
        committed = np.floor(np.maximum(lives - latency, 0.0) / interval)
        return np.mean(committed) * (interval - cost) / np.mean(lives)

    chosen = young_daly_seconds(cost, mtbf)
    best = max(kept(chosen * factor) for factor in np.geomspace(0.25, 4, 81) if chosen * factor > cost)
    assert kept(chosen) >= best - 0.002
    assert kept(chosen) > kept(2 * chosen) + 0.001
    assert kept(chosen) > kept(max(chosen / 2, 1.01 * cost)) + 0.001


@given(st.floats(1e-6, 1e6), st.floats(1.0, 1e7))
def test_the_young_daly_interval_is_young_s_for_cheap_saves_and_never_less_than_the_cost(cost, mtbf):
    interval = young_daly_seconds(cost, mtbf)
    assert interval >= cost
    if cost < 1e-4 * mtbf:
        assert interval == pytest.approx(math.sqrt(2 * cost * mtbf), rel=0.01)
