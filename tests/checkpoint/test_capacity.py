from hypothesis import assume, given
from hypothesis import strategies as st

from maxlite.checkpoint.capacity import most_kept, most_that_fit, room_bytes
from maxlite.checkpoint.keep import KeptStep, Preservation
from maxlite.config import CheckpointConfig

configs = st.builds(
    CheckpointConfig,
    enable_continuous_checkpointing=st.booleans(),
    checkpoint_period=st.integers(1, 50),
    max_num_checkpoints_to_keep=st.integers(1, 8),
    keep_checkpoint_every_n_steps=st.integers(0, 20),
    keep_best_n_checkpoints=st.integers(0, 3),
    keep_best_metric=st.just("loss"),
)


@given(config=configs, steps=st.integers(1, 60), losses=st.lists(st.floats(0, 10), min_size=61, max_size=61))
def test_no_run_holds_on_to_more(config, steps, losses):
    every = 1 if config.enable_continuous_checkpointing else config.checkpoint_period
    preservation, kept, most = Preservation(config), [], 0
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            kept.append(KeptStep(step, float(step), {"loss": losses[step]}, verified=False))
            doomed = preservation.to_delete(kept)
            kept = [one for one in kept if one.step not in doomed]
            most = max(most, len(kept))
    assert most <= most_kept(config, steps)


def test_a_short_run_needs_room_for_its_few_saves_only():
    config = CheckpointConfig(checkpoint_period=100, max_num_checkpoints_to_keep=50)
    assert most_kept(config, 250) == 4  # 0, 100, 200, 250


@given(config=configs, steps=st.integers(1, 60), state=st.integers(1, 10**9), free=st.integers(0, 10**11))
def test_as_many_as_fit_do_fit_and_no_more(config, steps, state, free):
    assume(room_bytes(config, steps, state) > free)
    count = most_that_fit(config, steps, state, free)

    def room(count):
        return room_bytes(config.model_copy(update={"max_num_checkpoints_to_keep": count}), steps, state)

    assert count < config.max_num_checkpoints_to_keep
    assert count == 0 or room(count) <= free
    assert room(count + 1) > free
