"""What is kept: every combination of rules, over rounds of saves and deletions, against the whole history."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.checkpoint.keep import KeptStep, Preservation
from maxlite.config import CheckpointConfig, InputError


class Sevens:
    """A person's own policy."""

    def steps_to_keep(self, steps):
        assert list(steps) == sorted(steps, key=lambda kept: kept.step)
        return range(0, 1000, 7)  # most of them are no checkpoints


class Nothing:
    def steps_to_keep(self, steps):
        return "12"


rules = st.fixed_dictionaries(
    {
        "max_num_checkpoints_to_keep": st.integers(1, 4),
        "keep_checkpoint_every_n_steps": st.sampled_from([0, 1, 5, 12]),
        "keep_checkpoint_every_n_seconds": st.sampled_from([0.0, 7.5, 40.0]),
        "keep_best_n_checkpoints": st.integers(0, 3),
        "keep_best_metric": st.sampled_from(["eval_loss", "loss"]),
        "checkpoint_preservation_policy": st.sampled_from([None, f"{__name__}.Sevens"]),
    }
)
# Few values, so that there are ties.
losses = st.one_of(st.sampled_from([1.0, 2.0, 2.5]), st.sampled_from([math.nan, math.inf, -math.inf]))
metrics = st.fixed_dictionaries({"loss": losses}, optional={"eval_loss": losses})
# Steps and seconds until the next save; the clock is set back now and then.
saves = st.lists(
    st.tuples(st.integers(1, 6), st.floats(-60, 30), metrics, st.booleans(), st.booleans()), min_size=1, max_size=40
)


def history_of(saves):
    step, created, history = 0, 1e9, []
    for steps, seconds, values, verified, _ in saves:
        step, created = step + steps, created + seconds
        history.append(KeptStep(step, created, values, verified))
    return history


def expected(config, history):
    """The steps to be kept of all that were ever saved."""
    keep = {kept.step for kept in history[-config.max_num_checkpoints_to_keep :]}
    keep |= {max(kept.step for kept in history if kept.verified)} if any(kept.verified for kept in history) else set()
    if n := config.keep_checkpoint_every_n_steps:
        keep |= {kept.step for kept in history if kept.step % n == 0}
    if seconds := config.keep_checkpoint_every_n_seconds:
        last = history[0]
        for kept in history:
            if kept is last or abs(kept.created - last.created) >= seconds:
                keep.add(kept.step)
                last = kept
    rest = [kept for kept in history if math.isfinite(kept.metrics.get(config.keep_best_metric, math.nan))]
    for _ in range(min(config.keep_best_n_checkpoints, len(rest))):
        best = min(rest, key=lambda kept: (kept.metrics[config.keep_best_metric], kept.step))
        keep.add(best.step)
        rest.remove(best)
    if config.checkpoint_preservation_policy:
        keep |= {kept.step for kept in history if kept.step % 7 == 0}
    return keep


@settings(deadline=None)
@given(rules, saves)
def test_what_is_kept_is_what_the_whole_history_asks_for(keys, saves):
    """So nothing kept for good ever disappears, and a deletion that was put off changes nothing."""
    config = CheckpointConfig(**keys)
    history, stored = history_of(saves), {}
    for index, kept in enumerate(history):
        stored[kept.step] = kept
        delete = Preservation(config).to_delete([*reversed(stored.values())])
        assert delete == sorted(delete)
        assert set(stored) - set(delete) == expected(config, history[: index + 1])
        if saves[index][-1]:  # else it died before it deleted
            for step in delete:
                del stored[step]


@settings(deadline=None)
@given(rules, saves)
def test_the_newest_and_the_newest_good_one_are_never_deleted(keys, saves):
    history = history_of(saves)
    delete = Preservation(CheckpointConfig(**keys)).to_delete(history)
    assert history[-1].step not in delete
    assert [kept.step for kept in history if kept.verified][-1:] not in [[step] for step in delete]


@settings(deadline=None)
@given(rules, saves)
def test_the_best_so_far_leaves_only_for_better_ones(keys, saves):
    config = CheckpointConfig(**{**keys, "keep_best_n_checkpoints": 1, "keep_best_metric": "loss"})
    history, best = history_of(saves), None
    for index, kept in enumerate(history):
        loss = kept.metrics["loss"]
        if math.isfinite(loss) and (best is None or loss < best.metrics["loss"]):
            best = kept
        if best is not None:
            assert best.step not in Preservation(config).to_delete(history[: index + 1])


def test_nothing_is_deleted_of_nothing():
    assert Preservation(CheckpointConfig()).to_delete([]) == []


def test_an_answer_that_is_no_collection_of_steps_is_refused():
    preservation = Preservation(CheckpointConfig(checkpoint_preservation_policy=f"{__name__}.Nothing"))
    with pytest.raises(InputError, match=r"Nothing.steps_to_keep returned '12', not a collection of steps"):
        preservation.to_delete([KeptStep(1, 0.0, {}, True)])
