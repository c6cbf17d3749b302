"""What processes must decide alike although each sees its own save end at a moment of its own.

Each process is a thread here. `FakeStore` is their exchange; nothing but the test moves a save on.
"""

from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import pytest

from maxlite.checkpoint import Checkpointer, Peers
from maxlite.checkpoint.policy import SavePolicy, Votes
from maxlite.config import CheckpointConfig

STATE = {"w": jnp.zeros(3), "n": jnp.int32(1)}


@pytest.fixture
def pair(tmp_path, store, storage, clock):
    """Two checkpointers of one run; `pair.both(part)` runs `part(checkpointer)` as both."""
    config = CheckpointConfig(checkpoint_timeout_seconds=20, enable_continuous_checkpointing=True)
    everyone = [Checkpointer(tmp_path, config, peers=Peers(index, 2, store), clock=clock) for index in range(2)]

    class Pair(list):
        def both(self, part):
            return list(pool.map(part, self))

    with ThreadPoolExecutor(2) as pool:
        pair = Pair(everyone)
        yield pair
        pair.both(lambda checkpointer: checkpointer.close())


@pytest.mark.parametrize("first", [0, 1])
def test_leaving_when_one_has_seen_the_save_end_and_the_other_has_not(pair, first):
    pair.both(lambda checkpointer: checkpointer.save(1, STATE))
    for checkpointer in pair:
        checkpointer._saves.pending.result.result(30)
    pair[first].poll()
    assert pair[first]._saves.pending is None
    assert pair[1 - first]._saves.pending is not None
    assert pair.both(lambda checkpointer: checkpointer.save_preempted(2, STATE, 20.0)) in ([1, 1], [2, 2])


def test_a_last_save_that_one_takes_for_failed_is_made_again_by_all(pair, monkeypatch):
    # The threads share the number that processes count their readings by.
    monkeypatch.setattr("maxlite.checkpoint.ending.check_step", lambda *arguments, **options: "")
    saves = pair[1]._saves
    committed = saves._committed

    def give_up_the_first(pending, what):
        saves._committed = committed
        saves._failed(pending.step, TimeoutError("given up a moment before it was committed"))

    saves._committed = give_up_the_first
    pair.both(lambda checkpointer: checkpointer.save_final(5, STATE))
    assert [checkpointer.stats.last_committed_step for checkpointer in pair] == [5, 5]
    assert [checkpointer.stats.failed for checkpointer in pair] == [0, 1]


def test_votes_cast_before_a_save_started_start_no_second_one_when_they_come_a_step_late():
    # Several processes learn of each other's votes for a step when its result is read: one step later.
    policy = SavePolicy(CheckpointConfig(enable_continuous_checkpointing=True))
    due = Votes(busy=False, due=True)
    policy.votes(1, 0.0, saving=False)
    assert policy.votes(2, 1.0, saving=False) == due
    assert policy.decide(2, due, cast_for=1)
    policy.started(2, 1.5)
    assert policy.votes(3, 2.0, saving=True).busy
    assert not policy.decide(3, due, cast_for=2)
    assert policy.decide(4, due, cast_for=3)
